--- Checks a quorum: each of its stores, their number, and the programs that use them.

local alike = require "hierlock.command.examine.alike"
local files = require "hierlock.command.examine.files"
local server = require "hierlock.command.server"
local subject_of = require "hierlock.command.examine.subject"

local quorum = {}

--- Works like the function of hierlock.command.examine.mysql.
function quorum.examine(subject, found)
  local stores, strategy = server.members(subject.dsn)
  local all, members, unsettled = strategy == "all", {}, false
  found:add("number of stores", (all or #stores % 2 == 1) and "ok" or "warning", ("%d, strategy %s"):format(#stores, strategy),
    "An even number of stores survives the loss of no more than one store less does; with `all`, none may be lost.",
    "name one store more, or one less")
  for i, dsn in ipairs(stores) do
    local member = subject_of.new(subject, dsn)
    function member.command(words)
      if words == "provision" then words = "provision --leases" end
      if server.has_password(dsn, member.said) then return ("for store %d: hierlock %s"):format(i, words) end
      return ("hierlock %s %s%s"):format(words, words == "leases" and "--dsn " or "", files.word(dsn))
    end
    member.leases_wanted = true
    local wrong = found.counts.wrong
    local of_member = { counts = found.counts }
    function of_member.add(_, check, ...) found:add(("%d: %s"):format(i, check), ...) end
    require("hierlock.command.examine." .. member.said.store).examine(member, of_member)
    member.unused = member.unsettled and found.counts.wrong == wrong
    members[i], unsettled = member, unsettled or member.unsettled
  end
  subject.unsettled = unsettled
  alike.examine(subject, found, members)
  subject.leases_tried = false -- the lock is one
  subject.unopened = "mend what is wrong with its stores, above"
  subject.mismatched = "name the same stores in all programs, each once: docs/quorum.md; or leave out --levels and --buckets"
  local command = subject.command
  function subject.command(words) return words == "provision" and subject.unopened or command(words) end
  subject.lock_denied = subject.unopened
  return true
end

return quorum
