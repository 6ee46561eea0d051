# hierlock: hierarchical locks for Lua.
#
#   make demo    builds, and shows the seven scenarios on the embedded store
#   make test    builds, gets throw-away servers, and runs all specs
#   make help    everything else
#
# ------------------------------------------------------------------- knobs

# The Lua to build for and to run with: lua5.1 lua5.2 lua5.3 lua5.4 luajit, or a path.
LUA ?= lua5.4
# The Luas of `make test`.
LUAS ?= $(LUA)

CC ?= cc
CFLAGS ?= -O2 -g
CPPFLAGS ?=
LDFLAGS ?=
# Beside CFLAGS and LDFLAGS, whatever these are; HARDENING= for none. A sanitizer has checks of its own.
HARDENING ?= $(if $(findstring -fsanitize,$(CFLAGS)),,-fstack-protector-strong \
               $(if $(filter -O1 -O2 -O3 -Os,$(CFLAGS)),-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2))
PKG_CONFIG ?= pkg-config
# Where lua.h is, if pkg-config does not know.
LUA_INCDIR ?=
LUA_CFLAGS ?= $(if $(LUA_INCDIR),-I$(LUA_INCDIR),$(shell $(PKG_CONFIG) --cflags $(notdir $(LUA)) 2>/dev/null))
LIBFLAG ?= -shared

# A store with a client library is a Lua module of its own. Its library is found by csrc/stores/client.sh, or by the
# client.sh in the folder of the store: NAME_LIBS and NAME_CFLAGS are empty when there is none. NAME_LIBS= builds
# without that store. NAME_INCDIR, NAME_LIBDIR: where header and library are; MYSQL_CONFIG, PG_CONFIG: another program
# that says so. MySQL's library is Oracle's libmysqlclient, or MariaDB Connector/C.
CLIENTS := MYSQL POSTGRESQL REDIS SQLITE MEMCACHED
MYSQL_NAME := mysql
POSTGRESQL_NAME := postgresql
REDIS_NAME := redis
SQLITE_NAME := sqlite
MEMCACHED_NAME := memcached
MYSQL_PACKAGE := libmariadb-dev libmariadb-dev-compat
POSTGRESQL_PACKAGE := libpq-dev
REDIS_PACKAGE := libhiredis-dev
SQLITE_PACKAGE := libsqlite3-dev
MEMCACHED_PACKAGE := libmemcached-dev
client = $(shell $(1)_INCDIR='$($(1)_INCDIR)' $(1)_LIBDIR='$($(1)_LIBDIR)' MYSQL_CONFIG='$(MYSQL_CONFIG)' \
           PG_CONFIG='$(PG_CONFIG)' PKG_CONFIG='$(PKG_CONFIG)' SYSROOT='$(SYSROOT)' \
           $(or $(wildcard csrc/stores/$($(1)_NAME)/client.sh),csrc/stores/client.sh $($(1)_NAME)) $(2)) \
         $(if $(filter-out 0,$(.SHELLSTATUS)),$(error The client library that was asked for is not there))
define find_client
ifeq ($$(origin $(1)_LIBS),undefined)
$(1)_LIBS := $$(call client,$(1),libs)
endif
ifeq ($$(origin $(1)_CFLAGS),undefined)
$(1)_CFLAGS := $$(call client,$(1),cflags)
endif
endef
$(foreach store,$(CLIENTS),$(eval $(call find_client,$(store))))
# Those whose library was found.
BUILT := $(foreach store,$(CLIENTS),$(if $(strip $($(store)_LIBS)),$(store)))

# Where it is installed; DESTDIR stands before all of these. LuaJIT counts as 5.1.
PREFIX ?= /usr/local
DESTDIR ?=
LUA_VERSION ?= $(or $(patsubst lua%,%,$(filter lua5.%,$(notdir $(LUA)))),$(if $(filter luajit%,$(notdir $(LUA))),5.1),$(shell $(LUA) -e 'io.write(_VERSION:sub(5))' 2>/dev/null))
INST_LUADIR ?= $(PREFIX)/share/lua/$(LUA_VERSION)
INST_LIBDIR ?= $(PREFIX)/lib/lua/$(LUA_VERSION)
INST_BINDIR ?= $(PREFIX)/bin
INST_INCDIR ?= $(PREFIX)/include
INST_CLIBDIR ?= $(PREFIX)/lib
INST_MANDIR ?= $(PREFIX)/share/man
INST_BASHDIR ?= $(PREFIX)/share/bash-completion/completions
INST_ZSHDIR ?= $(PREFIX)/share/zsh/site-functions
INST_DATADIR ?= $(PREFIX)/share/hierlock

# Where it is built; another one for each Lua and for each VARIANT (asan ...).
VARIANT ?=
BUILD ?= build/$(notdir $(LUA))$(addprefix -,$(VARIANT))

# What the specs run under, e.g. valgrind.
WRAPPER ?=
# What busted is told, e.g. BUSTED_FLAGS='--filter=token'.
BUSTED_FLAGS ?=
# The same, by spec/support/suite.sh. For that, too: LANES, how many files run side by side; SEED, from which
# their order follows; LIMIT, the seconds that each may take.
REPORT ?=

# ------------------------------------------------------------------- rules

SHELL := bash
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes \
            -Wmissing-prototypes -Wpointer-arith -Wundef
# Offsets in files have 64 bits, and no object tells where it was built.
HL_CFLAGS := -std=c11 -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -ffile-prefix-map=$(CURDIR)=. \
             -fPIC -fvisibility=hidden -pthread $(HARDENING) \
             $(WARNINGS) -Icsrc/core -Icsrc/stores/machine
HL_LDFLAGS = $(LIBFLAG) -pthread -Wl,-z,nodelete,-z,relro,-z,now

CORE := $(wildcard csrc/core/*.c) $(wildcard csrc/stores/embedded/*.c) \
        $(wildcard csrc/stores/null/*.c) $(wildcard csrc/stores/quorum/*.c) \
        $(wildcard csrc/stores/sql/*.c) $(wildcard csrc/stores/machine/*.c) \
        $(wildcard csrc/stores/judge/*.c)
BINDING := $(wildcard csrc/lua/*.c)
# What makes a Lua module of a store.
STORE_BINDING := csrc/lua/store/module.c csrc/lua/error.c
$(foreach store,$(CLIENTS),$(eval $(store) := $(wildcard csrc/stores/$($(store)_NAME)/*.c)))
$(foreach store,$(CLIENTS),$(eval $(store)_BINDING := csrc/lua/store/$($(store)_NAME).c))
# Small and without state that must be one: a store that is a module of its own has a copy of them.
SHARED := csrc/core/error.c csrc/core/record.c csrc/core/clock.c csrc/core/fork.c csrc/core/socket.c csrc/core/layout.c csrc/core/dsn.c csrc/core/hmac.c
MYSQL_SHARED := csrc/stores/judge/judge.c
POSTGRESQL_SHARED := $(MYSQL_SHARED)
REDIS_SHARED := $(MYSQL_SHARED)
MEMCACHED_SHARED := $(MYSQL_SHARED)
SQLITE_SHARED := $(wildcard csrc/stores/machine/*.c)

objects = $(patsubst csrc/%.c,$(BUILD)/obj/%.o,$(1))

CORE_SO := $(BUILD)/hierlock/core.so
module = $(BUILD)/hierlock/store/$($(1)_NAME).so
STORES := $(foreach store,$(CLIENTS),$(call module,$(store)))
LIBRARY := $(BUILD)/libhierlock.a
PKG_CONFIG_FILE := $(BUILD)/hierlock.pc

WITHOUT := $(patsubst %,without-%,$(filter-out $(BUILT),$(CLIENTS)))
.PHONY: all clean help $(WITHOUT)
all: $(BUILD)/headers $(CORE_SO) $(LIBRARY) $(PKG_CONFIG_FILE) $(foreach store,$(BUILT),$(call module,$(store))) $(WITHOUT)
MYSQL_LIBRARY := libmysqlclient and no MariaDB Connector/C
POSTGRESQL_LIBRARY := libpq
$(WITHOUT): without-%:
	@echo 'hierlock: no $(or $($*_LIBRARY),$($*_PACKAGE:-dev=)) found: the store for $($*_NAME): is not built.'
	@echo 'hierlock: Debian: apt-get install $($*_PACKAGE); or set $*_INCDIR, $*_LIBDIR.'

# Before anything is compiled for Lua: says in one line what is missing.
LUA_PACKAGE = $(if $(filter luajit%,$(notdir $(LUA))),libluajit-5.1-dev (beside nginx: libluajit2-5.1-dev),$\
              lib$(patsubst lua5.1,lua5.1-0,lua$(LUA_VERSION))-dev)
LUA_HEADERS = $(if $(filter luajit%,$(notdir $(LUA))),luajit,$(subst .,0,$(LUA_VERSION)))
$(BUILD)/headers:
	@fail() { echo "hierlock: $$*" >&2; exit 1; }; \
	command -v $(firstword $(CC)) >/dev/null || \
	  fail 'there is no C compiler $(CC): set CC, or, on Debian: apt-get install gcc libc6-dev'; \
	[[ -n '$(LUA_VERSION)' ]] || fail 'LUA=$(LUA) does not run: set LUA, as in LUA=lua5.4'; \
	found=$$(echo -e '#include <lauxlib.h>\nhl=LUA_VERSION_NUM LUA_LJDIR' | \
	  $(CC) $(LUA_CFLAGS) $(CPPFLAGS) $(CFLAGS) -E -P -x c - 2>/dev/null | sed -n 's/^hl=.*".*/luajit/p; s/^hl=\([0-9()*+ ]*\) LUA_LJDIR$$/\1/p'); \
	[[ $$found != *[0-9]* ]] || found=$$((found)); \
	case "$$found" in \
	  '$(LUA_HEADERS)') ;; \
	  luajit) [[ '$(LUA_VERSION)' == 5.1 ]] || fail 'the headers are those of LuaJIT, not of LUA=$(LUA): set LUA_INCDIR' ;; \
	  '') fail 'there is no lauxlib.h for LUA=$(LUA): set LUA_INCDIR, or, on Debian: apt-get install libc6-dev pkg-config $(LUA_PACKAGE)' ;; \
	  *) fail "the headers are those of Lua $${found/0/.}, not of LUA=$(LUA) ($(LUA_HEADERS:50%=5.%)): set LUA or LUA_INCDIR" ;; \
	esac
	@mkdir -p $(@D) && : >$@

$(call objects,$(BINDING) $(STORE_BINDING) $(foreach store,$(CLIENTS),$($(store)_BINDING))): | $(BUILD)/headers
$(BUILD)/obj/lua/%.o: HL_CFLAGS += $(LUA_CFLAGS)
$(BUILD)/obj/lua/store/%.o: HL_CFLAGS += -Icsrc/lua
SQL_TEXTS := $(BUILD)/obj/stores/postgresql/tables.o $(BUILD)/obj/lua/store/mysql.o
$(SQL_TEXTS): HL_CFLAGS += -I$(BUILD)/sql -Wno-overlength-strings
$(SQL_TEXTS): $(patsubst %,$(BUILD)/sql/%.sql.h,schema leases postgresql_leases)
$(foreach store,MYSQL POSTGRESQL REDIS,$(eval $(call objects,$($(store)_BINDING)): HL_CFLAGS += $($(store)_CFLAGS) -Icsrc/stores/$($(store)_NAME)))


$(BUILD)/obj/stores/redis/%.o: HL_CFLAGS += -I$(BUILD)/redis -Wno-overlength-strings
$(BUILD)/obj/stores/redis/script.o: $(BUILD)/redis/scripts.h

# What sql/ says, as strings of C.
$(BUILD)/sql/%.sql.h: sql/%.sql
	@mkdir -p $(@D)
	@sed 's/\\/\\\\/g; s/"/\\"/g; s/.*/"&\\n"/' $< >$@

# The scripts as strings of C, without their comments and indents: scripts/take.lua is hl__redis_lua_take.
$(BUILD)/redis/scripts.h: $(wildcard csrc/stores/redis/scripts/*.lua)
	@mkdir -p $(@D)
	@for script in $^; do \
	  echo "static const char hl__redis_lua_$$(basename "$$script" .lua)[] ="; \
	  sed 's/^ *//; /^--/d; /^$$/d; s/\\/\\\\/g; s/"/\\"/g; s/.*/  "&\\n"/' "$$script"; \
	  echo '  "";'; \
	done >$@

$(BUILD)/obj/%.o: csrc/%.c
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

# Lua's own functions come from the program that loads the module.
$(CORE_SO): $(call objects,$(CORE) $(BINDING))
	@mkdir -p $(@D)
	$(CC) $(HL_LDFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $^ -lm
define store_module
$(BUILD)/obj/stores/$($(1)_NAME)/%.o: HL_CFLAGS += $($(1)_CFLAGS)
$(call module,$(1)): $(call objects,$($(1)) $($(1)_BINDING) $(SHARED) $($(1)_SHARED) $(STORE_BINDING))
	@mkdir -p $$(@D)
	$$(CC) $$(HL_LDFLAGS) $$(CFLAGS) $$(LDFLAGS) -o $$@ $$^ $($(1)_LIBS) -lm
endef
$(foreach store,$(CLIENTS),$(eval $(call store_module,$(store))))

# What else a program needs that links all of it.
CLIENT_LIBS = $(strip $(foreach store,$(CLIENTS),$($(store)_LIBS)))
$(LIBRARY): $(call objects,$(CORE) $(foreach store,$(BUILT),$($(store))))
	@mkdir -p $(@D)
	rm -f $@
	$(AR) rcs $@ $^

# Where it will be is filled in when it is installed.
$(PKG_CONFIG_FILE): csrc/hierlock.pc.in csrc/core/hierlock.h $(LIBRARY)
	@mkdir -p $(@D)
	sed -e 's|@VERSION@|$(VERSION)|; s|@CLIENT@|$(CLIENT_LIBS)|' $< >$@

-include $(shell find build -name '*.d' 2>/dev/null)

# ------------------------------------------------------------------ install

# The version is said in one place.
VERSION = $(shell sed -n 's/^\#define HL_VERSION "\(.*\)"/\1/p' csrc/core/hierlock.h)

# MODE:SOURCE:TARGET; what install puts there is what uninstall removes.
INSTALL_LUA = $(foreach file,$(sort $(shell find lua -name '*.lua')),644:$(file):$(INST_LUADIR)/$(file:lua/%=%)) \
              755:$(CORE_SO):$(INST_LIBDIR)/hierlock/core.so \
              $(foreach store,$(CLIENTS),755:$(call module,$(store)):$(INST_LIBDIR)/hierlock/store/$($(store)_NAME).so)
# For stores of other makers: see docs/adding-a-store.md.
STORE_HEADERS := clock.h dsn.h error.h fork.h layout.h mode.h mutex.h record.h socket.h store.h
INSTALL_REST = 644:$(LIBRARY):$(INST_CLIBDIR)/libhierlock.a \
               644:csrc/core/hierlock.h:$(INST_INCDIR)/hierlock.h \
               $(foreach header,$(STORE_HEADERS),644:csrc/core/$(header):$(INST_INCDIR)/hierlock/$(header)) \
               $(foreach file,$(wildcard sql/*.sql),644:$(file):$(INST_DATADIR)/$(file)) \
               $(foreach file,$(wildcard docs/*.1),644:$(file):$(INST_MANDIR)/man1/$(notdir $(file)))
# Written when they are installed, as they say where.
INSTALL_WRITTEN = $(INST_CLIBDIR)/pkgconfig/hierlock.pc $(INST_BINDIR)/hierlock $(INST_BASHDIR)/hierlock $(INST_ZSHDIR)/_hierlock
# Ours alone: removed once they are empty, a directory after those in it.
OWN_DIRECTORIES = $(INST_LUADIR)/hierlock/attach $(INST_LUADIR)/hierlock/command/examine $(INST_LUADIR)/hierlock/command $(INST_LUADIR)/hierlock/loop $(INST_LUADIR)/hierlock/rows $(INST_LUADIR)/hierlock $(INST_LIBDIR)/hierlock/store \
                  $(INST_LIBDIR)/hierlock $(INST_INCDIR)/hierlock $(INST_DATADIR)/sql $(INST_DATADIR)

# The command finds the modules wherever PREFIX is.
define COMMAND
#!$(or $(shell command -v $(LUA) 2>/dev/null),/usr/bin/env $(LUA))
package.path = "$(INST_LUADIR)/?.lua;$(INST_LUADIR)/?/init.lua;" .. package.path
package.cpath = "$(INST_LIBDIR)/?.so;" .. package.cpath
require "hierlock.command.main"
endef

# Without the stores that were not built.
copy = for file in $(1); do \
         IFS=: read -r mode from to <<<"$$file"; \
         [[ $$from != $(BUILD)/hierlock/store/* || -e $$from ]] || continue; \
         install -D -m "$$mode" "$$from" "$(DESTDIR)$$to" || exit 1; \
       done

# What completes the command's line: SHELL, FILE. The command says it itself, where it runs here.
completion = if said=$$(LUA_PATH='lua/?.lua;lua/?/init.lua;;' LUA_CPATH='$(BUILD)/?.so;;' $(LUA) lua/hierlock/command/main.lua --completion $(1) 2>/dev/null); \
             then echo "$$said" | install -D -m 644 /dev/stdin "$(DESTDIR)$(2)"; \
             else echo 'hierlock: without completion for $(1): $(LUA) has no argparse, or no luv'; fi

.PHONY: install install-lua uninstall built rockspec
install: export COMMAND := $(COMMAND)
install: install-lua
	@$(call copy,$(INSTALL_REST))
	@sed -e 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(INST_CLIBDIR)|; s|@INCLUDEDIR@|$(INST_INCDIR)|' $(PKG_CONFIG_FILE) | \
	  install -D -m 644 /dev/stdin "$(DESTDIR)$(INST_CLIBDIR)/pkgconfig/hierlock.pc"
	@echo "$$COMMAND" | install -D -m 755 /dev/stdin "$(DESTDIR)$(INST_BINDIR)/hierlock"
	@$(call completion,bash,$(INST_BASHDIR)/hierlock)
	@$(call completion,zsh,$(INST_ZSHDIR)/_hierlock)

# The modules only, as LuaRocks wants it.
install-lua: built
	@$(call copy,$(INSTALL_LUA))
	@echo 'hierlock: installed for $(LUA), with the stores file null $(basename $(notdir $(wildcard $(STORES))))'
	@$(foreach store,$(STORES),$(if $(wildcard $(store)),,echo 'hierlock: without the store $(basename $(notdir $(store))): make has not built it, and says why';)):

# The rockspec to be published, which LuaRocks fetches from URL.
rockspec: export URL := $(URL)
rockspec:
	@[[ $$URL == git+*://* ]] || { echo 'hierlock: set URL to the public address of the repository: URL=git+https://…' >&2; exit 2; }
	@mkdir -p build
	@url=$$(sed 's/[&|\]/\\&/g' <<<"$$URL") && \
	sed 's|^  url = .*|  url = "'"$$url"'",\n  tag = "v$(VERSION)",|; /^-- `luarocks make` takes/,/^source/ { /^--/d }' \
	  rockspec/hierlock-$(VERSION)-1.rockspec >build/hierlock-$(VERSION)-1.rockspec
	@echo build/hierlock-$(VERSION)-1.rockspec

# What is installed was built before, perhaps by another user: nothing is written to build/.
built:
	@for file in $(CORE_SO) $(LIBRARY) $(PKG_CONFIG_FILE); do \
	  [[ -e $$file ]] || { echo "hierlock: there is no $$file: run make first, with the same LUA" >&2; exit 1; }; \
	done

uninstall:
	@for file in $(INSTALL_LUA) $(INSTALL_REST) $(INSTALL_WRITTEN); do rm -f "$(DESTDIR)$${file##*:}"; done
	@for directory in $(OWN_DIRECTORIES); do rmdir "$(DESTDIR)$$directory" 2>/dev/null || true; done

# -------------------------------------------------------------------- specs

# Packaging is the same on every Lua, and takes its time: make test-packaging.
# LuaSocket's select knows no descriptors above 1,023, and specs of the embedded store open thousands: those that
# need it have a process of their own.
ALONE := $(wildcard $(foreach name,loop scenarios matrix,spec/$(name)_spec.lua))
SPECS ?= $(ALONE) $(filter-out spec/packaging_spec.lua $(ALONE),$(wildcard spec/*_spec.lua))
SPEC_SO := $(patsubst spec/support/%.c,$(BUILD)/hierlock_spec/%.so,$(wildcard spec/support/*.c))
# ThreadSanitizer bears no allocator beside its own; code of a sanitizer is not stepped through.
CORE_TESTS := $(patsubst spec/core/%.c,$(BUILD)/%,$(filter-out $(if $(filter tsan,$(VARIANT)),%/test_memory.c) $(if $(filter asan tsan,$(VARIANT)),%/test_step.c),\
                $(wildcard spec/core/test_*.c)))
# busted runs on the Lua that it is started with; LuaJIT counts as 5.1.
LUA_BINARY ?= $(LUA)
# Connector/C reads the system's file of authorities for each log-in with TLS, whether it is to verify or not: 40 ms
# of a processor. No spec needs them.
WITHOUT_CAS := SSL_CERT_FILE=/dev/null SSL_CERT_DIR=/nonexistent
# HIERLOCK_DRIVERS: a directory with pgmoon and lua-resty-mysql, which Debian has no packages of; see CONTRIBUTING.md.
SPEC_ENV = LUA_PATH="$(CURDIR)/lua/?.lua;$(CURDIR)/lua/?/init.lua;$(CURDIR)/?.lua;$(CURDIR)/?/init.lua;$(if $(HIERLOCK_DRIVERS),$(HIERLOCK_DRIVERS)/?.lua;$(HIERLOCK_DRIVERS)/?/init.lua;);" \
           LUA_CPATH="$(CURDIR)/$(BUILD)/?.so;;" HIERLOCK_LUA=$(LUA_BINARY) $(SANITIZER_ENV)

$(BUILD)/hierlock_spec/%.so: spec/support/%.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE -fPIC -shared $(WARNINGS) -Icsrc/core $(LUA_CFLAGS) $(CFLAGS) -o $@ $<
# They are loaded into a server, or into a shell, which have no sanitizer.
$(BUILD)/hierlock_spec/late.so $(BUILD)/hierlock_spec/late_set.so $(BUILD)/hierlock_spec/frees.so \
$(BUILD)/hierlock_spec/slow_send.so: override CFLAGS := -O2

$(BUILD)/test_threads $(BUILD)/test_memory: HL_CFLAGS += $(MYSQL_CFLAGS)
$(BUILD)/test_judge: HL_CFLAGS += -Icsrc/stores/judge
$(BUILD)/test_memcached: HL_CFLAGS += -Icsrc/stores/memcached
$(BUILD)/test_quorum: HL_CFLAGS += -Icsrc/stores/quorum
$(BUILD)/test_embedded $(BUILD)/test_embedded_others $(BUILD)/test_embedded_file $(BUILD)/test_step: $(wildcard spec/embedded/*.h)
# It loads and unloads one that has the library in it.
$(BUILD)/test_unload: $(BUILD)/unloaded.so
$(BUILD)/unloaded.so: spec/core/unloaded.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CPPFLAGS) $(CFLAGS) -shared $(LDFLAGS) -o $@ $< $(LIBRARY)
$(BUILD)/test_%: spec/core/test_%.c $(wildcard spec/core/*.h) $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $< $(LIBRARY) -lcmocka $(CLIENT_LIBS) -lm

BUSTED = $(WITHOUT_CAS) $(SPEC_ENV) $(WRAPPER) $(LUA_BINARY) /usr/bin/busted --no-auto-insulate --helper=spec/support/leftovers.lua $(REPORT) $(BUSTED_FLAGS)

# Around it: a directory for the embedded stores.
SPEC_DIRECTORY = directory=$$(mktemp -d /dev/shm/hierlock-spec-XXXXXX) && trap 'rm -rf "$$directory"' EXIT && \
  export HIERLOCK_SPEC_DIRECTORY="$$directory"

.PHONY: test-core spec spec-built says-spec
# The core without Lua. cmocka says what it runs, so the last line of one that hangs tells where. With LIMIT=0 the
# caller ends it: `timeout` would put it into another process group. CORE_NAMES: only these of its tests, which
# CORE_PART, an end for the log's name, stands for.
test-core: $(CORE_TESTS)
	@printf '%s\n' $(CORE_TESTS) | xargs -P 2 -I TEST sh -c ' \
	  $(if $(filter 0,$(LIMIT)),,timeout --kill-after=5 $(or $(LIMIT),300)) env $(WITHOUT_CAS) $(SANITIZER_ENV) $(WRAPPER) TEST $(CORE_NAMES) >TEST$(CORE_PART).log 2>&1; status=$$?; \
	  cat TEST$(CORE_PART).log; \
	  case $$status in 0) exit ;; 124) echo "TEST hung, in the last test above" ;; *) echo "TEST ended with status $$status" ;; esac; false'

# The store of examples/store, for the specs that run on it; and headers where they are once they are installed.
$(BUILD)/include/hierlock:
	@mkdir -p $(@D) && ln -sfn $(CURDIR)/csrc/core $@
$(BUILD)/hierlock/store/folder.so: $(wildcard examples/store/*) $(LIBRARY) | $(BUILD)/include/hierlock
	@$(MAKE) -s -C examples/store BUILD=$(abspath $(BUILD)) CC='$(CC)' CFLAGS='$(CFLAGS)' LDFLAGS='$(LDFLAGS)' \
	  LUA_CFLAGS='$(LUA_CFLAGS)' HIERLOCK_CFLAGS='-I$(abspath $(BUILD))/include -I$(CURDIR)/csrc/core' \
	  HIERLOCK_LIBS='$(abspath $(LIBRARY))'

spec-built: all $(SPEC_SO) $(BUILD)/stress $(BUILD)/hierlock/store/folder.so
	@:

# The specs, with the servers that the environment names (see
# spec/support/servers.sh), or with none: then those for servers are pending.
spec: spec-built
	@$(SPEC_DIRECTORY) && \
	status=0; $(foreach specs,$(filter $(ALONE),$(SPECS)),$(BUSTED) $(specs) || status=1;) \
	$(if $(filter-out $(ALONE),$(SPECS)),$(BUSTED) $(filter-out $(ALONE),$(SPECS)) || status=1;) exit $$status

# The shell's line for a spec file that stands behind it: suite.sh runs it for each, where `make spec` would look for
# all libraries again.
says-spec:
	@:$(info $(SPEC_DIRECTORY) && $(BUSTED))

# --------------------------------------------------------------- demo, test

# What KIND+KIND… needs and is not there: deps-build+test, on $(LUAS).
deps-%:
	@spec/support/deps.sh $* $(LUAS)

.PHONY: demo test test-luas suite
demo: export HIERLOCK_WITHOUT_CLIENTS := 1
demo: deps-build+demo
	@$(MAKE) --no-print-directory -s build/demo/hierlock/core.so BUILD=build/demo
	@LUA_PATH="$(CURDIR)/lua/?.lua;$(CURDIR)/lua/?/init.lua;;" LUA_CPATH="$(CURDIR)/build/demo/?.so;;" \
	  HIERLOCK_LUA=$(LUA_BINARY) $(LUA_BINARY) examples/demo.lua $(DEMO)

# MYSQL_DSN=user:password@tcp(host:port)/database: on a server of yours instead.
ifndef MYSQL_DSN
test: export HIERLOCK_REQUIRE := mysql mariadb postgresql redis memcached nginx php
endif
test: export LANES ?= $(shell echo $$(($$(nproc) * 5)))
test: says-what-comes deps-build+test$(if $(MYSQL_DSN),,+servers)
	@$(MAKE) --no-print-directory suite

.PHONY: says-what-comes
says-what-comes:
	@echo 'make test: gets what is missing, builds, starts servers, and runs $(words $(SPECS)) spec files and $(words $(CORE_TESTS)) C tests'

# On further Luas: without the core's own tests, and without the specs that look at servers, at a store, or at the core
# beside them, which no Lua reaches: what the binding passes on, others say. So embedded looks at the lock directory and
# its queues (what handles are: stores, misuse, manager), and command_many at what servers answer for hundreds (what
# `ps` makes of it: command_ps).
SERVER_SPECS := assumptions boot command_doctor% command_kill command_leases command_many compatibility crowd deadlock% embedded exit \
                matrix memcached memory mysql% postgresql% quorum% redis% server sqlite storm structure symfony% update \
                waiting_trouble
# And on the first of them alone: leases, and what is Lua above the binding. Lua 5.1 takes all of its language that LuaJIT
# takes, and less: it yields nowhere that LuaJIT does not. So examples, interoperation and scenarios say nothing new on
# LuaJIT beside loop and pending, which have each way to wait there.
ONCE_SPECS := command command_% docs examples interoperation leases prometheus rows rows_% scenarios
test-luas:
	@$(MAKE) --no-print-directory test LUAS="$(LUAS)" CORE_TESTS= ONCE='$(ONCE_SPECS:%=spec/%_spec.lua)' \
	  SPECS='$(filter-out $(SERVER_SPECS:%=spec/%_spec.lua),$(SPECS))'

# The core's own tests, and the specs on each Lua, side by side. ONCE: specs for the first Lua alone.
suite:
	@echo 'building for $(LUAS)'
	@$(MAKE) --no-print-directory -s -j $$(nproc) spec-built $(CORE_TESTS)
	@for lua in $(LUAS); do $(MAKE) --no-print-directory -s -j $$(nproc) LUA=$$lua spec-built || exit 1; done
	@spec/support/suite.sh $(addprefix core:,$(CORE_TESTS)) \
	  $(addprefix $(firstword $(LUAS)):,$(SPECS)) \
	  $(foreach lua,$(wordlist 2,9,$(LUAS)),$(addprefix $(lua):,$(filter-out $(ONCE),$(SPECS))))

clean:
	rm -rf build

# spec/Makefile and bench/Makefile say the rest.
help::
	@echo 'make            build for $$LUA (now: $(LUA)) into $(BUILD)'
	@echo 'make demo       the seven scenarios on the embedded store, live'
	@echo 'make test       all specs, on throw-away servers; LUAS="lua5.4 lua5.1 luajit" LANES= SEED= LIMIT='
	@echo 'make test-luas  on further Luas: without what looks at servers alone; LUAS="lua5.1 luajit"'
	@echo 'make spec       SPECS="spec/…": in one process, on the servers that the environment names'
	@echo 'make install    what was built, to PREFIX=$(PREFIX); make uninstall'
	@echo 'make rockspec   the rockspec to be published; URL=git+https://…'
	@echo 'make clean      remove build/'

include spec/Makefile bench/Makefile
