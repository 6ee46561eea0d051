-- Every ordered pair of requests on a whole tree: two users, two accounts in each, two resources in each; exclusive,
-- and for the resources shared, too; on stores with subtrees all nodes. The waits are worked out twice: from the rule
-- alone, for ids that share no bucket; and from the rows of the plans, for ids that do.

local hierlock = require "hierlock"
local support = require "spec.support"

local unpack = table.unpack or unpack

local PLAN = { buckets = support.stores[1].options.buckets }

-- ------------------------------------------------------------------ trees

-- The nodes of the tree, each at a position such as "1", "12", "121". ids gives
-- ids to positions; others are named after them.
local function tree(ids)
  local nodes = {}
  local function add(parent, position)
    for i = 1, 2 do
      local at = position .. i
      local node = { unpack(parent) }
      node[#node + 1] = ids[at] or "n" .. at
      nodes[#nodes + 1] = node
      nodes[at] = node
      if #node < 3 then add(node, at) end
    end
  end
  add({}, "")
  return nodes
end

local function row_of(node)
  local rows = hierlock.plan({ node }, PLAN):rows()
  return rows[#rows].level .. "." .. rows[#rows].bucket
end

-- How many nodes have a row that another one has, too.
local function collisions(nodes)
  local seen, n = {}, 0
  for _, node in ipairs(nodes) do
    local row = row_of(node)
    if seen[row] then n = n + 1 end
    seen[row] = true
  end
  return n
end

-- The first tree, of those that differ in the id at one position, where the node there satisfies(row), and so many
-- nodes have another one's row.
local function search(position, count, satisfies)
  local node = tree({})[position]
  for i = 1, 1000000 do
    node[#node] = "n" .. position .. "-" .. i
    if satisfies(row_of(node)) then
      local nodes = tree { [position] = node[#node] }
      if collisions(nodes) == count then return nodes end
    end
  end
  error("there is no such tree")
end

local function without_collision()
  return search("1", 0, function() return true end)
end

-- The nodes at two positions, and no others, share a row.
local function with_collision(one, other)
  local wanted = row_of(tree({})[one])
  return search(other, 1, function(row) return row == wanted end)
end

-- Each node exclusively, and each resource, or (subtrees) each node, shared as well.
local function requests_of(nodes, subtrees)
  local requests = {}
  for _, node in ipairs(nodes) do
    requests[#requests + 1] = { target = node, mode = "exclusive" }
    if #node == 3 or subtrees then requests[#requests + 1] = { target = node, mode = "shared" } end
  end
  return requests
end

-- ---------------------------------------------------------------- oracles

local function conflict_by_mode(a, b) return a.mode == "exclusive" or b.mode == "exclusive" end

-- The rule: two requests conflict when one's node is the other's, or an ancestor
-- of it; but two shared ones do not.
local function conflict_by_rule(a, b)
  for level = 1, math.min(#a.target, #b.target) do
    if a.target[level] ~= b.target[level] then return false end
  end
  return conflict_by_mode(a, b)
end

-- The row of each node of the request, and whether it is the last; by level and bucket.
local function rows_of(request)
  local rows, by = hierlock.plan({ request.target }, PLAN):rows(), {}
  for i, row in ipairs(rows) do by[row.level .. "." .. row.bucket] = i == #rows and "node" or "ancestor" end
  return by
end

-- The rule of buckets: two requests conflict when they have a row in common that is the node's of one of them, and
-- either of them is exclusive.
local function conflict_by_rows(a, b)
  local rows = rows_of(a)
  for name, part in pairs(rows_of(b)) do
    if rows[name] and (part == "node" or rows[name] == "node") and conflict_by_mode(a, b) then return true end
  end
  return false
end

-- ------------------------------------------------------------------ tries

local TRY_ALL = [[
  local refused = {}
  for i, request in ipairs(...) do
    local handle, err = manager:acquire(request.target, { mode = request.mode, timeout = 0 })
    if handle then
      assert(handle:release { confirm = true })
    else
      assert(err.code == "timeout", err.message)
    end
    refused[i] = not handle
  end
  return refused
]]

local function name(request) return request.mode .. " " .. table.concat(request.target, "/") end

local function said(refused) return refused and "refused" or "granted" end

-- Holds one request after the other, while the peer tries all of them. Returns how
-- many were tried and refused, and in words those that went otherwise than
-- conflict(held, asked) says.
local function compare(manager, peer, requests, conflict)
  local tried, refused_count, wrong = 0, 0, {}
  for _, held in ipairs(requests) do
    local handle = assert(manager:acquire(held.target, { mode = held.mode }))
    local refused = peer:call(TRY_ALL, requests)
    assert(handle:release { confirm = true })
    for i, asked in ipairs(requests) do
      tried = tried + 1
      if refused[i] then refused_count = refused_count + 1 end
      if refused[i] ~= conflict(held, asked) then
        wrong[#wrong + 1] = ("%s was %s while %s was held"):format(name(asked), said(refused[i]), name(held))
      end
    end
  end
  return tried, refused_count, wrong
end

-- Every `step`-th of the pairs that conflict.
local function sample(requests, conflict, step)
  local chosen, n = {}, 0
  for _, held in ipairs(requests) do
    for _, asked in ipairs(requests) do
      if conflict(held, asked) then
        if n % step == 0 then chosen[#chosen + 1] = { held, asked } end
        n = n + 1
      end
    end
  end
  return chosen
end

local APART = without_collision()

local COLLISIONS = {
  { who = "two users", nodes = with_collision("1", "2") },
  { who = "two accounts of one user", nodes = with_collision("11", "12") },
  { who = "two accounts of different users", nodes = with_collision("11", "21") },
  { who = "two resources of one account", nodes = with_collision("111", "112") },
  { who = "two resources of different users", nodes = with_collision("111", "221") },
}

describe("the matrix of all pairs", function()
  support.each_store(function(store)
    local manager
    local function requests_on(nodes) return requests_of(nodes, store.subtrees) end

    before_each(function() manager = support.open(store) end)

    after_each(function()
      support.close_peers()
      manager:close()
    end)

    for _, kind in ipairs(support.peer_kinds) do
      it(("is as the rule says, where no two nodes share a bucket (the other one is a %s)"):format(kind[1]), function()
        local tried, refused, wrong = compare(manager, kind[2](store), requests_on(APART), conflict_by_rule)
        assert.same({}, wrong)
        -- Counted by hand, each with itself and the nodes above and below it. A user conflicts with 7 nodes, an
        -- account with 4, a resource with 3; a shared resource with 3 exclusive nodes, asked for before or after it,
        -- and with subtrees any shared node with as many exclusive ones as if it were one of them.
        local all = 2 * 7 + 4 * 4 + 8 * 3
        assert.equal(store.subtrees and 28 * 28 or 22 * 22, tried)
        assert.equal(all + 2 * (store.subtrees and all or 8 * 3), refused)
      end)
    end

    if store.unbucketed then
      it("has no extra waiting where there are no buckets to share", function()
        for _, collision in ipairs(COLLISIONS) do
          local _, _, wrong = compare(manager, support.process(store), requests_on(collision.nodes), conflict_by_rule)
          assert.same({}, wrong)
        end
      end)
    end

    for _, collision in ipairs(store.unbucketed and {} or COLLISIONS) do
      it(("has extra waiting where %s share a bucket, and nowhere else"):format(collision.who), function()
        local requests = requests_on(collision.nodes)
        local _, refused, wrong = compare(manager, support.process(store), requests, conflict_by_rows)
        assert.same({}, wrong)
        assert.is_true(refused > #sample(requests, conflict_by_rule, 1))
      end)
    end

    for _, kind in ipairs(support.peer_kinds) do
      it(("holds for those who wait, too: they do, and are granted after the release (each a %s)"):format(kind[1]),
        function()
        local peer = kind[2](store)
        for _, nodes in ipairs { APART, COLLISIONS[1].nodes } do
          for _, pair in ipairs(sample(requests_on(nodes), store.unbucketed and conflict_by_rule or conflict_by_rows, kind[1] == "process" and 17 or 37)) do
            local held, asked = pair[1], pair[2]
            local handle = assert(manager:acquire(held.target, { mode = held.mode }))
            peer:acquire("second", "acquire", asked.target, { mode = asked.mode })
            support.wait_for_waiters(store, asked.target)
            assert(handle:release { confirm = true })
            assert.is_true(peer:result())
            assert.is_true(peer:release("second"))
          end
        end
      end)
    end
  end, "intentions")

  it("never lets buckets miss a conflict that the rule sees", function()
    for _, collision in ipairs(COLLISIONS) do
      for _, pair in ipairs(sample(requests_of(collision.nodes, true), conflict_by_rule, 1)) do
        assert.is_true(conflict_by_rows(pair[1], pair[2]), name(pair[1]) .. ", " .. name(pair[2]))
      end
    end
  end)
end)
