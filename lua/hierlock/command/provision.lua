--- hierlock provision: makes the table of buckets and fills it. Fills in chunks, each a transaction of its own, in
-- the order of the primary key; rows that are there stay as they are. So it can be interrupted at any moment, and
-- run again at any time, also while other programs lock.

local uv = require "luv"
local leases = require "hierlock.command.lease_tables"
local progress = require "hierlock.command.progress"
local server = require "hierlock.command.server"
local space = require "hierlock.command.space"
local terminal = require "hierlock.command.terminal"

local unpack = table.unpack or unpack -- luacheck: ignore

local provision = {
  summary = "Make the table of buckets and fill it.",
  description = "Makes the table of buckets (hier_lock_buckets, or the table that the DSN names) and fills it, in chunks. " ..
    "Existing rows stay. To continue an interrupted run, give the same command again.",
}

local CHUNK = 50000   -- rows; about a tenth of a second
local PATIENCE = 60   -- seconds without progress after which a lost server is given up

function provision.options(parser)
  server.options(parser)
  parser:option("--chunk", "Rows of one transaction, at most 1000000."):convert(tonumber):default(tostring(CHUNK))
    :argname "ROWS"
  parser:option("--rate", "Rows per second at most, to spare a busy server."):convert(tonumber):argname "ROWS"
  parser:flag("--leases", "Make a space with leases; see hierlock(1). From then on programs of older versions are refused.")
  parser:flag("--updates", "Add the rows that mode=\"update\" needs: with three levels, a third more rows; see hierlock(1).")
  parser:option("--grant-to", "The role that may use leases on PostgreSQL, or PUBLIC."):argname "ROLE"
  parser:flag("-n --dry-run", "Print the SQL that is still to be run, and change nothing.")
end

local number = progress.number
local function now() return uv.hrtime() / 1e9 end
local function names(levels) return table.concat(levels, ",") end

local function mismatch(message, ...)
  return nil, { code = "mismatch", message = message:format(...), retryable = false }
end

local function execute(job, statement)
  if job.dry_run then return terminal.write(statement, ";\n\n") end
  return job.space.connection:query(statement)
end

-- ------------------------------------------------------- the wanted state

-- Settles job.buckets and job.levels: as asked, as recorded, or the defaults. Two
-- that disagree would lock different rows; so nothing is decided twice.
local function settle(job, found)
  local wanted, recorded = job.wanted, found.buckets ~= nil
  local buckets = found.buckets or space.DEFAULT_BUCKETS
  local levels = found.levels or space.DEFAULT_LEVELS
  if not recorded and found.empty then
    buckets, levels = wanted.buckets or buckets, wanted.levels or levels
  end
  if found.engine and found.engine ~= "InnoDB" then
    return nil, { code = "unsafe_server", message =
      ("the table %s is of engine %s, which locks no rows; it must be InnoDB"):format(job.table, found.engine) }
  end
  if (wanted.buckets or buckets) ~= buckets or names(wanted.levels or levels) ~= names(levels) then
    return mismatch("the table %s in %s has %s buckets for each of the levels %s%s, and was asked to have %s for %s. " ..
      "Programs that disagree would not exclude each other. To change it, stop all of them, drop the table%s",
      job.table, wanted.where, number(buckets), names(levels),
      recorded and "" or " (the defaults: it has rows, and hier_lock_meta does not say otherwise)",
      number(wanted.buckets or buckets), names(wanted.levels or levels),
      recorded and " and its row in hier_lock_meta" or "")
  end
  if job.buckets and (job.buckets ~= buckets or names(job.levels) ~= names(levels)) then
    return mismatch("the table %s was replaced meanwhile: it now has %s buckets for each of the levels %s",
      job.table, number(buckets), names(levels))
  end
  job.buckets, job.levels = buckets, levels
  return true
end

-- Whether its tables are its own; nil, err.
local function alone(job, leased)
  local rival, name, err = job.space:rival(leased)
  if err then return nil, err end
  if not rival then return true end
  return mismatch("the space %s has the table %s already: give this one another name (?table=)", rival, name)
end

-- Executes them one after the other; nil, err.
local function execute_all(job, statements)
  for _, statement in ipairs(statements) do
    local ok, err = execute(job, statement)
    if not ok then return nil, err end
  end
  return true
end

-- The steps to leases, in this order. First their tables and the gate. Then the record, from which on programs that
-- know of no leases do not connect. Then the new name of the buckets, from which on no program locks by the old
-- name. In between no program records a lease, as a program that would does not find the buckets.
local function lease(job, found)
  local self = job.space
  if #self.stem > 57 then
    return nil, { code = "dsn", message = ("the name %s is too long for leases"):format(self.name) }
  end
  local moves = found.unmoved or found.engine and not found.leased
  local tables = self:schema()
  self:lease()
  local ok, err = execute_all(job, { tables[2], unpack(self:lease_schema()) })
  if not ok then return nil, err end
  local there = 0
  if not job.dry_run then
    there, err = self:rows(self.stem .. "_gate")
    if not there then return nil, err end
  end
  if there < space.GATES then ok, err = execute(job, self:fill_gate()) end
  if ok and not found.leased then ok, err = execute(job, self:record(job.buckets, job.levels)) end
  if not ok then return nil, err end
  if not moves then return execute(job, self:schema()[1]) end
  if not job.dry_run then
    job.bar:say(("renaming %s to %s, once no lock is held"):format(self.name, self.table))
  else -- it is not there yet by that name, to be counted
    job.level = job.updates and #job.levels + 1 or #job.levels
  end
  return execute(job, self:move())
end

-- --------------------------------------------------------------- the chunks


-- Counts the rows that the server says it has inserted: some settings end a statement early without an error.
local function insert(job, level, first, last, there)
  local inserted, statements, err = 0
  if there > 0 and job.space.connection:logs_statements() then
    statements, err = job.space:fill_by_name(level, first, last)
    if not statements then return nil, err end
  else
    statements = { job.space:fill(level, first, last, there > 0) }
  end
  for _, statement in ipairs(statements) do
    local n
    n, err = execute(job, statement)
    if not n then return nil, err end
    inserted = inserted + (n == true and 0 or n)
  end
  if job.dry_run or there + inserted == last - first + 1 then return true end
  there, err = job.space:count(level, first, last) -- somebody else may have helped
  if not there then return nil, err end
  if there <= last - first then
    return nil, { code = "store", retryable = false, message =
      ("the server reported no error, and left out %s of the buckets %d to %d of level %d"):format(
        number(last - first + 1 - there), first, last, level) }
  end
  return true
end

-- Fills one chunk, from where the job stands. Every run counts the rows, as some may be missing anywhere; counting
-- costs a twentieth of inserting.
local function fill_chunk(job)
  local first = job.bucket
  -- Behind the levels come the update rows, where they are wanted.
  local level = job.level < #job.levels and job.level or space.update_level(#job.levels)
  local last = math.min(first + job.chunk, job.buckets) - 1
  local there, err = 0
  if not job.dry_run or job.exists then
    there, err = job.space:count(level, first, last)
    if not there then return nil, err end
  end
  local missing = last - first + 1 - there
  if missing > 0 then
    local ok
    ok, err = insert(job, level, first, last, there)
    if not ok then return nil, err end
  end
  job.done, job.inserted = job.done + last - first + 1, job.inserted + missing
  job.bucket = last + 1
  if job.bucket == job.buckets then job.level, job.bucket = job.level + 1, 0 end
  return missing
end

-- With --rate: sleeps for as long as the insertions are ahead of it.
local function throttle(job, started, before)
  local early = started + (job.inserted - before) / job.rate - now()
  if early > 0 then uv.sleep(math.ceil(early * 1000)) end
end

local function fill(job)
  local started, before = now(), job.inserted
  local levels = #job.levels + (job.updates and 1 or 0)
  while job.level < levels do
    local what = job.levels[job.level + 1] or "updates"
    local missing, err = fill_chunk(job)
    if not missing then return nil, err end
    job.progressed = now()
    job.bar:update(job.done, what)
    if job.rate and missing > 0 and not job.dry_run then throttle(job, started, before) end
  end
  return true
end

-- ------------------------------------------------------------- one connection

local function wait_for_others(job)
  local got, other = job.space:lock(0)
  if got == false then
    job.bar:say(("another `hierlock provision` is at work on %s (connection %s); waiting for it")
      :format(job.table, other or "?"))
  end
  while got == false do got, other = job.space:lock(1) end
  return got, other
end

local function prepare(job)
  local ok, err
  if not job.dry_run then
    ok, err = wait_for_others(job)
    if not ok then return nil, err end
  end
  local found
  found, err = job.space:look()
  if not found then return nil, err end
  ok, err = settle(job, found)
  if not ok then return nil, err end
  job.exists = found.engine ~= nil
  ok, err = alone(job, job.leases or found.leased)
  if not ok then return nil, err end
  if job.leases or found.leased then return lease(job, found) end
  if not found.engine or not found.buckets then
    ok, err = execute_all(job, job.space:schema())
    -- Record before the first row, so that no program takes a part of the table for something else.
    if ok and not found.buckets then ok, err = execute(job, job.space:record(job.buckets, job.levels)) end
  end
  return ok, err
end

-- Everything that one connection can do for the job.
local function attempt(job)
  local connection, ok, err
  connection, err = server.connect(job.wanted, "provision")
  if not connection then return nil, err end
  job.space = space.new(connection)
  job.table = job.space.name
  ok, err = prepare(job)
  job.table = job.space.table
  if ok then
    if not job.bar.total then
      job.bar.total = job.buckets * (#job.levels + (job.updates and 1 or 0))
      if not job.dry_run then
        job.bar:say(("%s in %s: %s buckets for each of the levels %s%s"):format(
          job.table, job.wanted.where, number(job.buckets), names(job.levels),
          job.updates and ", and the update rows" or ""))
      end
    end
    ok, err = fill(job)
  end
  connection:close()
  return ok, err
end

-- A lost connection, a restarted server: tries again until nothing has moved for
-- PATIENCE. A first connection that fails is told at once.
local function persist(job)
  local pause = 0.1
  while true do
    local progressed = job.progressed
    local ok, err = attempt(job)
    if ok then return true end
    if job.progressed ~= progressed then pause = 0.1 end
    if not err.retryable or not job.progressed or now() - job.progressed > PATIENCE then
      if job.progressed then
        err.message = err.message .. "; run the same command again: it goes on where it stopped"
      end
      return nil, err
    end
    job.bar:say(err.message .. "; trying again")
    uv.sleep(math.floor(pause * 1000))
    pause = math.min(pause * 2, 5)
  end
end

-- ------------------------------------------------------------------- run

local function whole(n, most) return n and n >= 1 and n <= most and n == math.floor(n) end

function provision.run(arguments)
  local ran, ok
  local wanted, err = server.parse(arguments)
  if not wanted then return nil, err end
  if not whole(arguments.chunk, space.CHUNK_MAX) then
    return nil, { code = "dsn", message = "--chunk must be a whole number from 1 to 1000000" }
  end
  if arguments.rate and (arguments.rate <= 0 or arguments.rate ~= arguments.rate) then
    return nil, { code = "dsn", message = "--rate must be a number of rows per second, more than 0" }
  end
  if wanted.store == "postgresql" and arguments.leases then return leases.provision(wanted, arguments) end
  if wanted.store ~= "mysql" then
    ok, err = terminal.write(wanted.store, ": needs no provisioning\n")
    return ok and 0, err
  end
  local job = {
    wanted = wanted, dry_run = arguments.dry_run, leases = arguments.leases, updates = arguments.updates,
    rate = arguments.rate,
    -- Not more than a quarter of a second's worth at once.
    chunk = arguments.rate and math.max(1, math.min(arguments.chunk, math.floor(arguments.rate / 4))) or arguments.chunk,
    level = 0, bucket = 0, done = 0, inserted = 0,
    bar = progress.new(nil, arguments.quiet or arguments.dry_run),
  }
  local started = now()
  ran, ok, err = pcall(persist, job)
  job.bar:finish(job.bar.total and job.done, "")
  if not ran then
    if job.bar.total and not job.dry_run then
      io.stderr:write("interrupted; run the same command again: it goes on where it stopped\n")
    end
    error(ok, 0)
  end
  if ok and not job.dry_run then
    ok, err = terminal.write(("%s is complete: %s rows, %s of them new, in %.1f s\n"):format(
      job.table, number(job.done), number(job.inserted), now() - started))
  end
  return ok and 0, err
end

return provision
