-- Five ways to do the shop's work while others do the same; the first has no control at all. Each way
-- has:
--
--   buy(ref, id, number)          a customer buys; ref is the order's name, of his form
--   deliver(id, number, seen)     a clerk adds to the stock that he has seen: `seen` is the row as his screen had it
--   save(id, typed, seen)         a clerk saves a screen that he opened a while ago: name and price
--   reprice(id)                   the nightly batch makes one product dearer
--   send()                        a worker sends the message of an order; false: no message is free just now
--
-- Each returns true, or nil and an err: `refused`, `stale`, `timeout`, or what else hierlock.rows and hierlock say.
-- docs/exclusive-control.md has the SQL that goes over the wire.

local ffi = require "ffi"
local rows = require "hierlock.rows"
local data = require "shop.data"

ffi.cdef "int poll(void *, unsigned long, int);"

local ways = { NAMES = { "none", "conditional", "optimistic", "pessimistic", "hierlock" } }

local THINK = (tonumber(os.getenv "SHOP_THINK") or 0.002) * 1000
local TRIES = 10 -- of who reads anew because another one was first
local DEARER = 10
local MANY = 10 -- orders that a worker looks at

-- The price of a sale. Computing it takes a while, as if another program were asked. This blocks the worker, like
-- a driver that does not yield to nginx. Meanwhile others change the row.
local function cost(product, number)
  ffi.C.poll(nil, 0, THINK)
  return product.price * number
end

local function refused(product) return nil, { code = "refused", message = "there are not enough", current = product } end

local function gone() return nil, { code = "stale", message = "there is no such product", gone = true } end

--- Sleeps so many seconds. In nginx other requests go on meanwhile.
function ways.sleep(seconds)
  if ngx then ngx.sleep(seconds) else ffi.C.poll(nil, 0, seconds * 1000) end
end

-- Calls fn, a few times at most, until no other program was first.
local function again(fn)
  for try = 1, TRIES do
    local done, err = fn()
    if done ~= nil or err.code ~= "stale" or err.gone or try == TRIES then return done, err end
  end
end

-- Calls fn(db) in a transaction; after a deadlock it tries again.
local function transaction(fn) return data.db():transaction({ retries = 3 }, fn) end

-- The product, with a lock that the transaction keeps to its end.
local function locked(db, id)
  local product, err = db:read("shop_product", id, { lock = "update", wait = data.WAIT })
  return product and data.numbers(product), err
end

-- Calls fn under a lock on the node {"shop", kind, id}.
local function alone(kind, id, label, timeout, fn)
  local manager, err = data.locks()
  if not manager then return nil, err end
  return manager:with({ "shop", kind, id }, { timeout = timeout, label = label }, fn)
end

-- For a worker: whether another worker has, or has had, this order, so that it looks at the next
-- order.
local PASSED_BY = { refused = true, stale = true, timeout = true }

-- Calls send(order) for orders that seem to be new until one is sent.
local function first_new(send)
  for _, order in ipairs(data.new_orders(MANY)) do
    local sent, err = send(order)
    if sent then return true end
    if not PASSED_BY[err.code] then return nil, err end
  end
  return false
end

-- ------------------------------------------------------------------ none

-- Each statement is right, and the whole is not: the value has changed between the read and the
-- write.
local none = {}
ways.none = none

function none.buy(ref, id, number)
  local product = data.product(id)
  if not product then return gone() end
  if product.stock < number then return refused(product) end
  local price = cost(product, number)
  data.run("UPDATE shop_product SET stock = stock - ? WHERE id = ?", number, id)
  data.add_order(ref, id, number, price)
  return true
end

function none.deliver(id, number, seen)
  data.run("UPDATE shop_product SET stock = ? WHERE id = ?", seen.stock + number, id)
  return true
end

function none.save(id, typed)
  data.run("UPDATE shop_product SET name = ?, price = ? WHERE id = ?", typed.name, typed.price, id)
  return true
end

function none.reprice(id)
  local product = data.product(id)
  if not product then return gone() end
  data.run("UPDATE shop_product SET price = ? WHERE id = ?", product.price + DEARER, id)
  return true
end

function none.send()
  return first_new(function(order)
    data.send(order)
    data.run("UPDATE shop_order SET status = 'sent' WHERE ref = ?", order.ref)
    return true
  end)
end

-- ----------------------------------------------------------- conditional

-- A single statement changes the row, if the condition still holds. The way holds no lock, and needs no
-- retry.
local conditional = {}
ways.conditional = conditional

function conditional.buy(ref, id, number)
  local product = data.product(id)
  if not product then return gone() end
  local price = cost(product, number)
  return transaction(function(db)
    local ok, err = db:update("shop_product", id, { stock = rows.expr("stock - ?", number) }, { where = { "stock >= ?", number } })
    if not ok then return nil, err end
    data.add_order(ref, id, number, price)
    return true
  end)
end

function conditional.deliver(id, number)
  return data.db():update("shop_product", id, { stock = rows.expr("stock + ?", number) }, { where = { "stock >= 0" } })
end

-- The condition: the row still has the values that the clerk has seen.
function conditional.save(id, typed, seen)
  return data.db():update("shop_product", id, { name = typed.name, price = typed.price }, { old = seen, columns = { "name", "price" } })
end

function conditional.reprice(id)
  return data.db():update("shop_product", id, { price = rows.expr("price + ?", DEARER) }, { where = { "price > 0" } })
end

-- The worker commits the state in between before it sends the message. If it dies then, the order stays `sending`:
-- a person has to find out whether its message is out.
local function by_states(first)
  return function()
    return first_new(function(order)
      local mine, err = data.db():update("shop_order", order.ref, { status = "sending" }, first(order))
      if not mine then return nil, err end
      data.send(order)
      return data.db():update("shop_order", order.ref, { status = "sent" }, { where = { "status = 'sending'" } })
    end)
  end
end

conditional.send = by_states(function() return { where = { "status = ?", "new" } } end)

-- ------------------------------------------------------------ optimistic

-- No lock is held while the price is computed. A write names the version that was read; if another writer was first,
-- it fails.
local optimistic = {}
ways.optimistic = optimistic

function optimistic.buy(ref, id, number)
  return again(function()
    local product = data.product(id)
    if not product then return gone() end
    if product.stock < number then return refused(product) end
    local price = cost(product, number)
    return transaction(function(db)
      local ok, err = db:update("shop_product", id, { stock = product.stock - number }, { version = product.version })
      if not ok then return nil, err end
      data.add_order(ref, id, number, price)
      return true
    end)
  end)
end

-- The clerk has seen another number than the present one, and must look again, as the clerk
-- may have counted.
function optimistic.deliver(id, number, seen)
  return data.db():update("shop_product", id, { stock = seen.stock + number }, { version = seen.version })
end

function optimistic.save(id, typed, seen)
  return data.db():update("shop_product", id, { name = typed.name, price = typed.price }, { version = seen.version })
end

function optimistic.reprice(id)
  return again(function()
    local product = data.product(id)
    if not product then return gone() end
    return data.db():update("shop_product", id, { price = product.price + DEARER }, { version = product.version })
  end)
end

optimistic.send = by_states(function(order) return { version = order.version } end)

-- ----------------------------------------------------------- pessimistic

-- The row is locked when it is read, until COMMIT. Others wait.
local pessimistic = {}
ways.pessimistic = pessimistic

function pessimistic.buy(ref, id, number)
  return transaction(function(db)
    local product, err = locked(db, id)
    if not product then return nil, err end
    if product.stock < number then return refused(product) end
    local price = cost(product, number)
    local ok
    ok, err = db:update("shop_product", id, { stock = product.stock - number })
    if not ok then return nil, err end
    data.add_order(ref, id, number, price)
    return true
  end)
end

function pessimistic.deliver(id, number)
  return transaction(function(db)
    local product, err = locked(db, id)
    if not product then return nil, err end
    return db:update("shop_product", id, { stock = product.stock + number })
  end)
end

-- No lock spans the two requests of a screen. So its version is compared, under the lock.
function pessimistic.save(id, typed, seen)
  return transaction(function(db)
    local product, err = locked(db, id)
    if not product then return nil, err end
    return db:update("shop_product", id, { name = typed.name, price = typed.price }, { version = seen.version })
  end)
end

function pessimistic.reprice(id)
  return transaction(function(db)
    local product, err = locked(db, id)
    if not product then return nil, err end
    return db:update("shop_product", id, { price = product.price + DEARER })
  end)
end

function pessimistic.send()
  return data.db():transaction({ retries = 3, isolation = "read committed" }, function(db)
    local claim, err = db:claim("shop_order", { where = { "status = ?", "new" }, order = "ref", limit = 1 })
    if not claim then return nil, err end
    local order = claim.rows[1]
    if not order then return false end
    data.send(order)
    local done
    done, err = claim:done(order, { status = "sent" })
    if not done then return nil, err end
    return true
  end)
end

-- -------------------------------------------------------------- hierlock

-- Each piece of work is a node: the stock of a product, its price, an order's message. No transaction is open while
-- the price is computed, stock and price do not wait for each other, and a waiter learns the holder's name.
local by_node = {}
ways.hierlock = by_node

function by_node.buy(ref, id, number)
  return alone("stock", id, "a sale", data.WAIT, function()
    local product = data.product(id)
    if not product then return gone() end
    if product.stock < number then return refused(product) end
    local price = cost(product, number)
    return transaction(function(db)
      local ok, err = db:update("shop_product", id, { stock = product.stock - number })
      if not ok then return nil, err end
      data.add_order(ref, id, number, price)
      return true
    end)
  end)
end

function by_node.deliver(id, number)
  return alone("stock", id, "a delivery", data.WAIT, function()
    local product = data.product(id)
    if not product then return gone() end
    return transaction(function(db) return db:update("shop_product", id, { stock = product.stock + number }) end)
  end)
end

-- This lock does not span the two requests either. To protect the typed text, check the product out:
-- examples/checkout.
function by_node.save(id, typed, seen)
  return alone("price", id, "a clerk's screen", data.WAIT, function()
    return data.db():update("shop_product", id, { name = typed.name, price = typed.price },
                            { old = seen, columns = { "name", "price" } })
  end)
end

-- The batch does not wait: it puts the product aside, and comes back to it.
function by_node.reprice(id)
  return alone("price", id, "nightly prices", 0, function()
    local product = data.product(id)
    if not product then return gone() end
    return transaction(function(db) return db:update("shop_product", id, { price = product.price + DEARER }) end)
  end)
end

function by_node.send()
  return first_new(function(order)
    return alone("message", order.ref, "a message", 0, function()
      if data.order(order.ref).status ~= "new" then return nil, { code = "refused" } end -- it was, before we had the lock
      data.send(order)
      return data.db():update("shop_order", order.ref, { status = "sent" }, { where = { "status = ?", "new" } })
    end)
  end)
end

-- ------------------------------------------------------------- the batch

--- The nightly batch: each product by itself, committed at once. The batch puts held products aside, and tries them
-- again in the end, for so many seconds. Returns how many were done, and a list of { product, holders } of the
-- others, with the holders that were seen. Or returns nil and an err that is not about a single product.
function ways.nightly(way, seconds)
  local aside, done, ends = {}, 0, os.time() + seconds
  for _, product in ipairs(data.products()) do aside[#aside + 1] = { product = product } end
  repeat
    local left = {}
    for _, case in ipairs(aside) do
      local ok, err = ways[way].reprice(case.product.id)
      if ok then
        done = done + 1
      elseif PASSED_BY[err.code] or err.code == "deadlock" then
        case.holders = err.holders or case.holders -- in a loop it is not looked each time
        left[#left + 1] = case
      else
        return nil, err
      end
    end
    aside = left
    if #aside > 0 then ways.sleep(0.1) end
  until #aside == 0 or os.time() >= ends
  return done, aside
end

return ways
