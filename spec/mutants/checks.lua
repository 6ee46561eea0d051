-- Which checks belong to which files, for spec/mutants/run.lua: the quick ones first. A file belongs to the first area
-- whose pattern it matches. A check is `core:TEST` of spec/core, with the name of one of its tests, or a spec file, with a
-- pattern for the titles of its specs; `luajit:` before it: with LuaJIT, which nginx needs.

local C = { "core:test_core", "core:test_misuse", "core:test_leases", "core:test_waiting", "core:test_crowd", "core:test_sessions",
  "core:test_cancel", "core:test_embedded_store", "core:test_threads" }

local function with(...)
  local list = table.move(C, 1, #C, 1, {})
  for _, check in ipairs { ... } do list[#list + 1] = check end
  return list
end

local HOST = with("core:test_embedded", "core:test_embedded_others", "core:test_embedded_file", "core:test_embedded_directory",
  "core:test_embedded_leases", "embedded", "stores on embedded", "update on embedded", "leases on embedded", "fork", "sqlite", "leases on sqlite", "symfony",
  "core:test_memory nothing_leaks_*")

-- Only these look at lua-resty-mysql, and at pgmoon in nginx.
local IN_NGINX = os.getenv "HIERLOCK_DRIVERS" and "luajit:attach_nginx"

local function area(name, files, list) return { name = name, files = files, checks = list } end

return {
  area("core", "^csrc/core/", with("core:test_started", "plan", "dsn", "error", "misuse", "manager", "pending", "extend", "deadlock", "units", "any",
    "stats", "hooks", "fork", "with", "embedded", "update on embedded", "leases on embedded", "leases on postgresql", "core:test_memory")),
  area("binding", "^csrc/lua/request", { "luajit:nginx on embedded" }),
  area("binding", "^csrc/lua/notifier", { "loop connection to nginx", "luajit:nginx on embedded" }),
  area("binding", "^csrc/lua/lease", { "leases on embedded", "finalizer", "stats", "with", "embedded", "leases on sqlite" }),
  area("binding", "^csrc/lua/", { "plan", "dsn", "error", "misuse", "manager", "pending", "extend", "deadlock", "units", "any", "stats", "hooks",
    "loop", "with", "fork", "finalizer", "prometheus", "embedded", "update on embedded", "leases on embedded", "command_doctor_files",
    "mysql_connect", "redis" }),
  area("file", "^csrc/stores/embedded/", HOST),
  area("machine", "^csrc/stores/machine/", HOST),
  area("null", "^csrc/stores/null/", { "manager null", "update everything", "misuse", "core:test_memory nothing_leaks_*" }),
  area("mysql", "^csrc/stores/mysql/dsn", { "dsn", "mysql_connect", "core:test_memory nothing_leaks_*" }),
  area("postgresql", "^csrc/stores/postgresql/dsn", { "dsn", "postgresql", "core:test_memory nothing_leaks_*" }),
  area("redis", "^csrc/stores/redis/dsn", { "dsn", "redis_sentinel", "redis_cluster", "redis", "core:test_memory nothing_leaks_*" }),
  area("memcached", "^csrc/stores/memcached/dsn", { "dsn", "core:test_memcached", "memcached", "core:test_memory nothing_leaks_*" }),
  area("mysql", "^csrc/stores/mysql/", { "mysql", "mysql_connect", "mysql_pool", "mysql_cost", "mysql_leases", "stores on mysql", "update on mysql",
    "leases on mysql", "leases on mariadb", "mysql_table", "mysql_trouble", "mysql_refusals", "mysql_blind", "command_ps", "security",
    "core:test_memory on_mysql" }),
  area("postgresql", "^csrc/stores/postgresql/", { "core:test_postgresql", "postgresql", "postgresql_leases", "stores on postgresql",
    "update on postgresql", "leases on postgresql", "symfony", "postgresql_security",
    "core:test_memory on_postgresql" }),
  area("judge", "^csrc/stores/judge/", { "core:test_judge", "mysql_refusals", "postgresql", "redis", "memcached", "command_doctor",
    "command_doctor_postgresql", "command_doctor_redis" }),
  area("sql", "^csrc/stores/sql/", { "mysql_refusals", "postgresql", "mysql_leases", "postgresql_leases", "mysql_table" }),
  area("redis", "^csrc/stores/redis/cluster", { "redis_cluster", "update on redis", "core:test_memory nothing_leaks_*" }),
  area("redis", "^csrc/stores/redis/sentinel", { "redis_sentinel", "update on redis", "core:test_memory nothing_leaks_*" }),
  area("redis", "^csrc/stores/redis/", { "core:test_memory nothing_leaks_*", "update on redis", "redis", "leases on redis", "symfony_redis",
    "redis_tls", "redis_cluster", "redis_sentinel" }),
  area("sqlite", "^csrc/stores/sqlite/", { "core:test_sqlite", "sqlite", "update on sqlite", "leases on sqlite",
    "core:test_memory nothing_leaks_*" }),
  area("memcached", "^csrc/stores/memcached/", { "core:test_memcached", "core:test_memory nothing_leaks_*", "update on memcached", "memcached",
    "leases on memcached" }),
  area("quorum", "^csrc/stores/quorum/", { "core:test_quorum", "quorum_list", "quorum", "update on quorum", "leases on quorum", "quorum_tables",
    "core:test_memory nothing_leaks_*" }),
  area("attach", "^lua/hierlock/attach", { "attach", "postgresql_attach", IN_NGINX }),
  area("rows", "^lua/hierlock/rows", { "rows", "rows_transaction", "rows_trouble", IN_NGINX }),
  area("command", "^lua/hierlock/command/lease_tables", { "postgresql_leases" }),
  area("command", "^lua/hierlock/command/examine/mysql", { "command_doctor", "command_ps", "mysql_table" }),
  area("command", "^lua/hierlock/command/examine/postgresql", { "command_doctor_postgresql", "command" }),
  area("command", "^lua/hierlock/command/examine/redis", { "command_doctor_redis", "redis_cluster", "redis_sentinel" }),
  area("command", "^lua/hierlock/command/examine/", { "command_doctor_files", "command_doctor_redis", "command_doctor", "quorum_list" }),
  area("command", "^lua/hierlock/command/doctor", { "command_doctor_files", "command_doctor", "command" }),
  area("command", "^lua/hierlock/command/bench", { "command_bench", "command" }),
  area("command", "^lua/hierlock/command/explain", { "command_explain", "command" }),
  area("command", "^lua/hierlock/command/graph", { "command_graph", "command" }),
  area("command", "^lua/hierlock/command/kill", { "command_kill", "command_leases", "command" }),
  area("command", "^lua/hierlock/command/matrix", { "command_matrix", "command" }),
  area("command", "^lua/hierlock/command/provision", { "command", "command_doctor", "command_leases" }),
  area("command", "^lua/hierlock/command/ps", { "command_ps", "command_many", "command" }),
  area("command", "^lua/hierlock/command/run", { "command_run", "command" }),
  area("command", "^lua/hierlock/command/screen", { "command_top" }),
  area("command", "^lua/hierlock/command/top", { "command_top", "command" }),
  area("command", "^lua/hierlock/command/", { "command", "command_leases", "command_ps", "command_kill", "command_run", "command_explain",
    "command_graph", "command_matrix", "command_top", "command_bench", "command_doctor", "command_doctor_files" }),
  area("lua", "^lua/hierlock/loop/ngx", { "luajit:nginx on embedded" }),
  area("lua", "^lua/hierlock/loop/", { "loop on embedded", "loop" }),
  area("lua", "^lua/", { "manager", "with", "misuse", "loop", "prometheus", "pending", "stats", "any", "leases on embedded" }),
}
