-- For wrk: each connection asks a hundred times a second at most.
function delay() return 10 end -- luacheck: ignore
