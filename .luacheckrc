std = "max"
max_line_length = 160
-- 432: a method of an object that is built in a constructor shadows its self.
ignore = { "431/self", "432/self", "212/self" }
files["spec"].std = "+busted"
files["bench/ps_cost_spec.lua"].std = "+busted"
exclude_files = { "build", "csrc" } -- csrc: scripts of Redis, each of which is put together of several files
files["lua/hierlock/loop/ngx.lua"].std = "+ngx_lua"
files["examples/checkout"].std = "+ngx_lua"
files["examples/shop"].std = "+ngx_lua"
