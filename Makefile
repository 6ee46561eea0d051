# hierlock: hierarchical locks for Lua.
#
#   make demo    builds, and shows the seven scenarios on the embedded store
#   make test    builds, gets throw-away servers, and runs all specs
#   make help    everything else
#
# ------------------------------------------------------------------- knobs

# The Lua to build for and to run with: lua5.1 lua5.2 lua5.3 lua5.4 luajit.
LUA ?= lua5.4
# The Luas of `make test`.
LUAS ?= $(LUA)

CC ?= cc
CFLAGS ?= -O2 -g
CPPFLAGS ?=
LDFLAGS ?=
PKG_CONFIG ?= pkg-config
LUA_CFLAGS ?= $(shell $(PKG_CONFIG) --cflags $(LUA) 2>/dev/null)
# libmysqlclient or MariaDB Connector/C; empty when there is none.
MYSQL_CONFIG ?= $(firstword $(shell command -v mysql_config mariadb_config 2>/dev/null))
ifneq ($(MYSQL_CONFIG),)
MYSQL_CFLAGS ?= $(shell $(MYSQL_CONFIG) --include)
MYSQL_LIBS ?= $(shell $(MYSQL_CONFIG) --libs)
else
MYSQL_CFLAGS ?= $(shell $(PKG_CONFIG) --cflags libmariadb 2>/dev/null || $(PKG_CONFIG) --cflags mysqlclient 2>/dev/null)
MYSQL_LIBS ?= $(shell $(PKG_CONFIG) --libs libmariadb 2>/dev/null || $(PKG_CONFIG) --libs mysqlclient 2>/dev/null)
endif

# Where it is built; another one for each Lua and for each VARIANT (asan ...).
VARIANT ?=
BUILD ?= build/$(LUA)$(addprefix -,$(VARIANT))

# What the specs run under, e.g. valgrind.
WRAPPER ?=
# What busted is told, e.g. BUSTED_FLAGS='--filter=token'.
BUSTED_FLAGS ?=

# ------------------------------------------------------------------- rules

SHELL := bash
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes \
            -Wmissing-prototypes -Wpointer-arith -Wundef
HL_CFLAGS := -std=c11 -D_GNU_SOURCE -fPIC -fvisibility=hidden -pthread \
             $(WARNINGS) -Icsrc/core
HL_LDFLAGS := -shared -pthread -Wl,-z,nodelete

CORE := $(wildcard csrc/core/*.c) $(wildcard csrc/stores/file/*.c) \
        $(wildcard csrc/stores/null/*.c)
BINDING := $(wildcard csrc/lua/*.c)
MYSQL := $(wildcard csrc/stores/mysql/*.c)
# Of the MySQL store, what is for Lua only.
MYSQL_BINDING := csrc/stores/mysql/module.c csrc/stores/mysql/connection.c
# Small and without state that must be one: a store that is a module of its own
# has a copy of them.
SHARED := csrc/core/error.c csrc/core/clock.c csrc/core/fork.c csrc/core/layout.c csrc/core/dsn.c

objects = $(patsubst csrc/%.c,$(BUILD)/obj/%.o,$(1))

CORE_SO := $(BUILD)/hierlock/core.so
MYSQL_SO := $(BUILD)/hierlock/store/mysql.so
LIBRARY := $(BUILD)/libhierlock.a

.PHONY: all clean help
all: $(CORE_SO) $(LIBRARY)
ifneq ($(strip $(MYSQL_LIBS)),)
all: $(MYSQL_SO)
else
all: without-mysql
.PHONY: without-mysql
without-mysql:
	@echo 'hierlock: no libmysqlclient and no MariaDB Connector/C found: the MySQL store is not built.'
	@echo 'hierlock: Debian: apt-get install libmariadb-dev libmariadb-dev-compat; or set MYSQL_CFLAGS, MYSQL_LIBS.'
endif

$(BUILD)/obj/lua/%.o: HL_CFLAGS += $(LUA_CFLAGS)
$(BUILD)/obj/stores/mysql/%.o: HL_CFLAGS += $(MYSQL_CFLAGS)
$(call objects,$(MYSQL_BINDING)): HL_CFLAGS += $(LUA_CFLAGS) -Icsrc/lua

$(BUILD)/obj/%.o: csrc/%.c
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

# Lua's own functions come from the program that loads the module.
$(CORE_SO): $(call objects,$(CORE) $(BINDING))
	@mkdir -p $(@D)
	$(CC) $(HL_LDFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $^ -lm

$(MYSQL_SO): $(call objects,$(MYSQL) $(SHARED) csrc/lua/error.c)
	@mkdir -p $(@D)
	$(CC) $(HL_LDFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(MYSQL_LIBS) -lm

$(LIBRARY): $(call objects,$(CORE) $(filter-out $(MYSQL_BINDING),$(MYSQL)))
	@mkdir -p $(@D)
	rm -f $@
	$(AR) rcs $@ $^

-include $(shell find build -name '*.d' 2>/dev/null)

# -------------------------------------------------------------------- specs

SPECS ?= spec
SPEC_SO := $(patsubst spec/support/%.c,$(BUILD)/hierlock_spec/%.so,$(wildcard spec/support/*.c))
CORE_TESTS := $(patsubst spec/core/%.c,$(BUILD)/%,$(wildcard spec/core/test_*.c))
# busted runs on the Lua that it is started with; LuaJIT counts as 5.1.
LUA_BINARY ?= $(LUA)
SPEC_ENV = LUA_PATH="$(CURDIR)/lua/?.lua;$(CURDIR)/lua/?/init.lua;$(CURDIR)/?.lua;$(CURDIR)/?/init.lua;;" \
           LUA_CPATH="$(CURDIR)/$(BUILD)/?.so;;" HIERLOCK_LUA=$(LUA_BINARY) $(SANITIZER_ENV)

$(BUILD)/hierlock_spec/%.so: spec/support/%.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE -fPIC -shared $(WARNINGS) $(LUA_CFLAGS) $(CFLAGS) -o $@ $<

$(BUILD)/test_threads: HL_CFLAGS += $(MYSQL_CFLAGS)
$(BUILD)/test_%: spec/core/test_%.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) -Icsrc/stores/file $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $< $(LIBRARY) -lcmocka $(MYSQL_LIBS) -lm

.PHONY: test-core spec
# The core without Lua.
test-core: $(CORE_TESTS)
	@for test in $(CORE_TESTS); do $(SANITIZER_ENV) $(WRAPPER) $$test || exit 1; done

# The specs, with the servers that the environment names (see
# spec/support/servers.sh), or with none: then those for servers are pending.
spec: all $(SPEC_SO)
	@directory=$$(mktemp -d /dev/shm/hierlock-spec-XXXXXX) && trap 'rm -rf "$$directory"' EXIT && \
	export HIERLOCK_SPEC_DIRECTORY="$$directory" && \
	$(SPEC_ENV) $(WRAPPER) $(LUA_BINARY) /usr/bin/busted --no-auto-insulate $(BUSTED_FLAGS) $(SPECS)

# -------------------------------------------------------------------- bench

$(BUILD)/bare: bench/bare.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE $(CFLAGS) $(MYSQL_CFLAGS) -o $@ $< $(MYSQL_LIBS)

.PHONY: bench
# BENCH="embedded mysql mariadb": which; BENCH_ROUNDS: how many rounds.
bench: all $(BUILD)/bare
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(SPEC_ENV) BENCH_BARE="$(CURDIR)/$(BUILD)/bare" spec/support/servers.sh run "$$directory" -- \
	  $(LUA_BINARY) bench/run.lua $(BENCH)

$(BUILD)/clients: bench/clients.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CFLAGS) $(MYSQL_CFLAGS) -o $@ $< $(LIBRARY) $(MYSQL_LIBS) -lm

.PHONY: bench-nginx
# With LUA=luajit; needs Debian's nginx, libnginx-mod-http-lua and wrk.
bench-nginx: all $(BUILD)/clients
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && store=$$(mktemp -d /dev/shm/hierlock-bench-XXXXXX) && \
	trap 'rm -rf "$$directory" "$$store"' EXIT && export HIERLOCK_SPEC_DIRECTORY="$$store" && \
	$(SPEC_ENV) BENCH_CLIENTS="$(CURDIR)/$(BUILD)/clients" spec/support/servers.sh run "$$directory" -- \
	  $(LUA_BINARY) bench/nginx.lua

# --------------------------------------------------------- demo, test, lint

.PHONY: demo test suite lint asan
demo:
	@HIERLOCK_WITHOUT_MYSQL=1 spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh demo
	@$(MAKE) --no-print-directory -s build/demo/hierlock/core.so BUILD=build/demo
	@LUA_PATH="$(CURDIR)/lua/?.lua;$(CURDIR)/lua/?/init.lua;;" LUA_CPATH="$(CURDIR)/build/demo/?.so;;" \
	  HIERLOCK_LUA=$(LUA_BINARY) $(LUA_BINARY) examples/demo.lua $(DEMO)

# MYSQL_DSN=user:password@tcp(host:port)/database: on a server of yours instead.
test:
	@spec/support/deps.sh build $(LUAS)
	@spec/support/deps.sh test $(LUAS)
	@for lua in $(LUAS); do $(MAKE) --no-print-directory LUA=$$lua all || exit 1; done
ifdef MYSQL_DSN
	@$(MAKE) --no-print-directory suite
else
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	HIERLOCK_REQUIRE="mysql mariadb nginx" spec/support/servers.sh run "$$directory" -- \
	  $(MAKE) --no-print-directory suite
endif

# The core's own tests, and the specs on each Lua; with the servers that the
# environment names.
suite:
	@$(MAKE) --no-print-directory test-core
	@for lua in $(LUAS); do \
	  echo "--- specs on $$lua"; \
	  $(MAKE) --no-print-directory spec LUA=$$lua || exit 1; \
	done

lint:
	@spec/support/deps.sh lint
	luacheck --no-color -q lua spec bench examples
	cppcheck -q --std=c11 --enable=warning,performance,portability --inline-suppr \
	  --suppress=missingIncludeSystem --error-exitcode=1 -D_GNU_SOURCE -Icsrc/core -Icsrc/lua csrc
	$(MAKE) --no-print-directory -s all VARIANT=lint CC=clang CFLAGS='-O1 -Werror -Wthread-safety -Wthread-safety-beta'
	$(MAKE) --no-print-directory -s all VARIANT=lint-gcc CC=gcc CFLAGS='-O2 -Werror'
	clang-tidy --quiet --warnings-as-errors='*' $(CORE) $(BINDING) $(MYSQL) -- \
	  $(HL_CFLAGS) $(LUA_CFLAGS) $(MYSQL_CFLAGS) -Icsrc/lua 2>&1 | grep -v 'warnings generated'; test $${PIPESTATUS[0]} -eq 0

# AddressSanitizer must be loaded before everything else, and a Lua that is not
# built with it leaks at its end by design. A small quarantine, as specs look at how
# much memory the process has.
ASAN_CFLAGS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
ASAN_ENV = LD_PRELOAD="$(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)" \
           ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1
asan:
	@spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh test
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	HIERLOCK_REQUIRE="mysql mariadb" spec/support/servers.sh run "$$directory" -- \
	  $(MAKE) --no-print-directory suite LUAS=$(LUA) VARIANT=asan CFLAGS='$(ASAN_CFLAGS)' \
	    SANITIZER_ENV='$(ASAN_ENV)'

# The reference of the Lua interface. LDoc says on its output whatever it merges.
.PHONY: docs
docs:
	@spec/support/deps.sh docs
	@mkdir -p build
	@ldoc --fatalwarnings . >build/ldoc.log || { cat build/ldoc.log; exit 1; }
	@echo build/docs/index.html

clean:
	rm -rf build

help:
	@echo 'make            build for $$LUA (now: $(LUA)) into $(BUILD)'
	@echo 'make demo       the seven scenarios on the embedded store, live'
	@echo 'make test       all specs, on throw-away servers; LUAS="lua5.4 lua5.1 luajit"'
	@echo 'make bench      how fast it is, as ratios measured in one run'
	@echo 'make lint       luacheck, cppcheck, clang-tidy, -Werror'
	@echo 'make asan       the specs under AddressSanitizer and UBSan'
	@echo 'make docs       the reference of the Lua interface, into build/docs'
	@echo 'make clean      remove build/'
