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

# libmysqlclient or MariaDB Connector/C, as csrc/stores/mysql/client.sh finds it; both empty when there is
# none. MYSQL_LIBS= builds without the MySQL store. MYSQL_CONFIG: another mysql_config; MYSQL_INCDIR,
# MYSQL_LIBDIR: where mysql.h and the library are.
client = $(shell MYSQL_CONFIG='$(MYSQL_CONFIG)' MYSQL_INCDIR='$(MYSQL_INCDIR)' MYSQL_LIBDIR='$(MYSQL_LIBDIR)' \
           PKG_CONFIG='$(PKG_CONFIG)' SYSROOT='$(SYSROOT)' csrc/stores/mysql/client.sh $(1)) \
         $(if $(filter-out 0,$(.SHELLSTATUS)),$(error The client library that was asked for is not there))
ifeq ($(origin MYSQL_LIBS),undefined)
MYSQL_LIBS := $(call client,libs)
endif
ifeq ($(origin MYSQL_CFLAGS),undefined)
MYSQL_CFLAGS := $(call client,cflags)
endif

# libpq, as csrc/stores/postgresql/client.sh finds it; both empty when there is none. POSTGRESQL_LIBS= builds
# without the PostgreSQL store. PG_CONFIG: another pg_config; POSTGRESQL_INCDIR, POSTGRESQL_LIBDIR: where libpq-fe.h
# and the library are.
libpq = $(shell PG_CONFIG='$(PG_CONFIG)' POSTGRESQL_INCDIR='$(POSTGRESQL_INCDIR)' \
          POSTGRESQL_LIBDIR='$(POSTGRESQL_LIBDIR)' PKG_CONFIG='$(PKG_CONFIG)' SYSROOT='$(SYSROOT)' \
          csrc/stores/postgresql/client.sh $(1)) \
        $(if $(filter-out 0,$(.SHELLSTATUS)),$(error The client library that was asked for is not there))
ifeq ($(origin POSTGRESQL_LIBS),undefined)
POSTGRESQL_LIBS := $(call libpq,libs)
endif
ifeq ($(origin POSTGRESQL_CFLAGS),undefined)
POSTGRESQL_CFLAGS := $(call libpq,cflags)
endif

# The stores that need but one library, as csrc/stores/client.sh finds it: NAME_LIBS and NAME_CFLAGS are empty when there is
# none. NAME_LIBS= builds without that store. NAME_INCDIR, NAME_LIBDIR: where header and library are.
OWN_STORES := REDIS SQLITE MEMCACHED
REDIS_NAME := redis
SQLITE_NAME := sqlite
MEMCACHED_NAME := memcached
REDIS_PACKAGE := libhiredis-dev
SQLITE_PACKAGE := libsqlite3-dev
MEMCACHED_PACKAGE := libmemcached-dev
library = $(shell $(1)_INCDIR='$($(1)_INCDIR)' $(1)_LIBDIR='$($(1)_LIBDIR)' PKG_CONFIG='$(PKG_CONFIG)' SYSROOT='$(SYSROOT)' \
            csrc/stores/client.sh $($(1)_NAME) $(2)) \
          $(if $(filter-out 0,$(.SHELLSTATUS)),$(error The client library that was asked for is not there))
define own_store
ifeq ($$(origin $(1)_LIBS),undefined)
$(1)_LIBS := $$(call library,$(1),libs)
endif
ifeq ($$(origin $(1)_CFLAGS),undefined)
$(1)_CFLAGS := $$(call library,$(1),cflags)
endif
endef
$(foreach store,$(OWN_STORES),$(eval $(call own_store,$(store))))

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

CORE := $(wildcard csrc/core/*.c) $(wildcard csrc/stores/file/*.c) \
        $(wildcard csrc/stores/null/*.c) $(wildcard csrc/stores/quorum/*.c) \
        $(wildcard csrc/stores/sql/*.c) $(wildcard csrc/stores/machine/*.c)
BINDING := $(wildcard csrc/lua/*.c)
MYSQL := $(wildcard csrc/stores/mysql/*.c)
# What makes a Lua module of it.
STORE_BINDING := csrc/lua/store/module.c csrc/lua/error.c
MYSQL_BINDING := csrc/lua/store/mysql.c
POSTGRESQL := $(wildcard csrc/stores/postgresql/*.c)
POSTGRESQL_BINDING := csrc/lua/store/postgresql.c
$(foreach store,$(OWN_STORES),$(eval $(store) := $(wildcard csrc/stores/$($(store)_NAME)/*.c)))
$(foreach store,$(OWN_STORES),$(eval $(store)_BINDING := csrc/lua/store/$($(store)_NAME).c))
OWN_BINDINGS := $(foreach store,$(OWN_STORES),$($(store)_BINDING))
# Small and without state that must be one: a store that is a module of its own
# has a copy of them.
SHARED := csrc/core/error.c csrc/core/clock.c csrc/core/fork.c csrc/core/layout.c csrc/core/dsn.c csrc/core/hmac.c \
          csrc/stores/sql/judge.c
OWN_SHARED := $(filter csrc/core/%,$(SHARED))
SQLITE_SHARED := $(wildcard csrc/stores/machine/*.c)

objects = $(patsubst csrc/%.c,$(BUILD)/obj/%.o,$(1))

CORE_SO := $(BUILD)/hierlock/core.so
MYSQL_SO := $(BUILD)/hierlock/store/mysql.so
POSTGRESQL_SO := $(BUILD)/hierlock/store/postgresql.so
own_so = $(BUILD)/hierlock/store/$($(1)_NAME).so
STORES := $(MYSQL_SO) $(POSTGRESQL_SO) $(foreach store,$(OWN_STORES),$(call own_so,$(store)))
LIBRARY := $(BUILD)/libhierlock.a
PKG_CONFIG_FILE := $(BUILD)/hierlock.pc

.PHONY: all clean help
all: $(BUILD)/headers $(CORE_SO) $(LIBRARY) $(PKG_CONFIG_FILE)
ifneq ($(strip $(MYSQL_LIBS)),)
all: $(MYSQL_SO)
else
all: without-mysql
.PHONY: without-mysql
without-mysql:
	@echo 'hierlock: no libmysqlclient and no MariaDB Connector/C found: the MySQL store is not built.'
	@echo 'hierlock: Debian: apt-get install libmariadb-dev libmariadb-dev-compat; or set MYSQL_INCDIR, MYSQL_LIBDIR.'
endif

ifneq ($(strip $(POSTGRESQL_LIBS)),)
all: $(POSTGRESQL_SO)
else
all: without-postgresql
.PHONY: without-postgresql
without-postgresql:
	@echo 'hierlock: no libpq found: the PostgreSQL store is not built.'
	@echo 'hierlock: Debian: apt-get install libpq-dev; or set POSTGRESQL_INCDIR, POSTGRESQL_LIBDIR.'
endif

# Those whose library was found.
BUILT_STORES := $(foreach store,$(OWN_STORES),$(if $(strip $($(store)_LIBS)),$(store)))
all: $(foreach store,$(BUILT_STORES),$(call own_so,$(store))) $(foreach store,$(filter-out $(BUILT_STORES),$(OWN_STORES)),without-$(store))
WITHOUT := $(foreach store,$(OWN_STORES),without-$(store))
.PHONY: $(WITHOUT)
$(WITHOUT): without-%:
	@echo 'hierlock: no $(patsubst %-dev,%,$($*_PACKAGE)) found: the store for $($*_NAME): is not built.'
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

$(call objects,$(BINDING) $(STORE_BINDING) $(MYSQL_BINDING) $(POSTGRESQL_BINDING) $(OWN_BINDINGS)): | $(BUILD)/headers
$(BUILD)/obj/lua/%.o: HL_CFLAGS += $(LUA_CFLAGS)
$(BUILD)/obj/stores/mysql/%.o: HL_CFLAGS += $(MYSQL_CFLAGS)
$(BUILD)/obj/stores/postgresql/%.o: HL_CFLAGS += $(POSTGRESQL_CFLAGS)
$(BUILD)/obj/lua/store/%.o: HL_CFLAGS += -Icsrc/lua
SQL_TEXTS := $(BUILD)/obj/stores/postgresql/tables.o $(BUILD)/obj/lua/store/mysql.o
$(SQL_TEXTS): HL_CFLAGS += -I$(BUILD)/sql -Wno-overlength-strings
$(SQL_TEXTS): $(patsubst %,$(BUILD)/sql/%.sql.h,schema leases postgresql_leases)
$(call objects,$(POSTGRESQL_BINDING)): HL_CFLAGS += $(POSTGRESQL_CFLAGS) -Icsrc/stores/postgresql
$(call objects,$(MYSQL_BINDING)): HL_CFLAGS += $(MYSQL_CFLAGS) -Icsrc/stores/mysql
$(call objects,$(REDIS_BINDING)): HL_CFLAGS += $(REDIS_CFLAGS) -Icsrc/stores/redis

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

$(MYSQL_SO): $(call objects,$(MYSQL) $(MYSQL_BINDING) $(SHARED) $(STORE_BINDING))
	@mkdir -p $(@D)
	$(CC) $(HL_LDFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(MYSQL_LIBS) -lm

$(POSTGRESQL_SO): $(call objects,$(POSTGRESQL) $(POSTGRESQL_BINDING) $(SHARED) $(STORE_BINDING))
	@mkdir -p $(@D)
	$(CC) $(HL_LDFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(POSTGRESQL_LIBS) -lm

define own_module
$(BUILD)/obj/stores/$($(1)_NAME)/%.o: HL_CFLAGS += $($(1)_CFLAGS)
$(call own_so,$(1)): $(call objects,$($(1)) $($(1)_BINDING) $(OWN_SHARED) $($(1)_SHARED) $(STORE_BINDING))
	@mkdir -p $$(@D)
	$$(CC) $$(HL_LDFLAGS) $$(CFLAGS) $$(LDFLAGS) -o $$@ $$^ $($(1)_LIBS) -lm
endef
$(foreach store,$(OWN_STORES),$(eval $(call own_module,$(store))))

# What else a program needs that links all of it.
CLIENT_LIBS = $(strip $(MYSQL_LIBS) $(POSTGRESQL_LIBS) $(foreach store,$(OWN_STORES),$($(store)_LIBS)))
$(LIBRARY): $(call objects,$(CORE) $(if $(strip $(MYSQL_LIBS)),$(MYSQL)) $(if $(strip $(POSTGRESQL_LIBS)),$(POSTGRESQL)) \
             $(foreach store,$(BUILT_STORES),$($(store))))
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
              755:$(MYSQL_SO):$(INST_LIBDIR)/hierlock/store/mysql.so \
              755:$(POSTGRESQL_SO):$(INST_LIBDIR)/hierlock/store/postgresql.so \
              $(foreach store,$(OWN_STORES),755:$(call own_so,$(store)):$(INST_LIBDIR)/hierlock/store/$($(store)_NAME).so)
INSTALL_REST = 644:$(LIBRARY):$(INST_CLIBDIR)/libhierlock.a \
               644:csrc/core/hierlock.h:$(INST_INCDIR)/hierlock.h \
               $(foreach file,$(wildcard sql/*.sql),644:$(file):$(INST_DATADIR)/$(file)) \
               $(foreach file,$(wildcard docs/*.1),644:$(file):$(INST_MANDIR)/man1/$(notdir $(file)))
# Written when they are installed, as they say where.
INSTALL_WRITTEN = $(INST_CLIBDIR)/pkgconfig/hierlock.pc $(INST_BINDIR)/hierlock $(INST_BASHDIR)/hierlock $(INST_ZSHDIR)/_hierlock
# Ours alone: removed once they are empty, a directory after those in it.
OWN_DIRECTORIES = $(INST_LUADIR)/hierlock/attach $(INST_LUADIR)/hierlock/command/examine $(INST_LUADIR)/hierlock/command $(INST_LUADIR)/hierlock/loop $(INST_LUADIR)/hierlock/rows $(INST_LUADIR)/hierlock $(INST_LIBDIR)/hierlock/store \
                  $(INST_LIBDIR)/hierlock $(INST_DATADIR)/sql $(INST_DATADIR)

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

.PHONY: install install-lua uninstall built
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
# ThreadSanitizer bears no allocator beside its own.
CORE_TESTS := $(patsubst spec/core/%.c,$(BUILD)/%,$(filter-out $(if $(filter tsan,$(VARIANT)),%/test_memory.c),\
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
	$(CC) -std=c11 -D_GNU_SOURCE -fPIC -shared $(WARNINGS) $(LUA_CFLAGS) $(CFLAGS) -o $@ $<

$(BUILD)/test_threads $(BUILD)/test_memory: HL_CFLAGS += $(MYSQL_CFLAGS)
# So that it can stop a thread behind its giving back a mutex, also one in the library.
$(BUILD)/test_file_store: TEST_LDFLAGS = -Wl,--wrap=pthread_mutex_unlock
# It loads and unloads one that has the library in it.
$(BUILD)/test_unload: $(BUILD)/unloaded.so
$(BUILD)/unloaded.so: spec/core/unloaded.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CPPFLAGS) $(CFLAGS) -shared $(LDFLAGS) -o $@ $< $(LIBRARY)
$(BUILD)/test_%: spec/core/test_%.c $(wildcard spec/core/*.h) $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) -Icsrc/stores/file $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $(TEST_LDFLAGS) -o $@ $< $(LIBRARY) -lcmocka $(CLIENT_LIBS) -lm

BUSTED = $(WITHOUT_CAS) $(SPEC_ENV) $(WRAPPER) $(LUA_BINARY) /usr/bin/busted --no-auto-insulate --helper=spec/support/leftovers.lua $(REPORT) $(BUSTED_FLAGS)

.PHONY: test-core spec spec-built
# The core without Lua. cmocka says what it runs, so the last line of one that hangs tells where.
test-core: $(CORE_TESTS)
	@printf '%s\n' $(CORE_TESTS) | xargs -P 2 -I TEST sh -c ' \
	  timeout --kill-after=5 $(or $(LIMIT),300) env $(WITHOUT_CAS) $(SANITIZER_ENV) $(WRAPPER) TEST >TEST.log 2>&1; status=$$?; cat TEST.log; \
	  [ $$status != 124 ] || echo "TEST hung, in the last test above"; [ $$status = 0 ]'

spec-built: all $(SPEC_SO) $(BUILD)/stress
	@:

# The specs, with the servers that the environment names (see
# spec/support/servers.sh), or with none: then those for servers are pending.
spec: spec-built
	@directory=$$(mktemp -d /dev/shm/hierlock-spec-XXXXXX) && trap 'rm -rf "$$directory"' EXIT && \
	export HIERLOCK_SPEC_DIRECTORY="$$directory" && \
	status=0; $(foreach specs,$(filter $(ALONE),$(SPECS)),$(BUSTED) $(specs) || status=1;) \
	$(if $(filter-out $(ALONE),$(SPECS)),$(BUSTED) $(filter-out $(ALONE),$(SPECS)) || status=1;) exit $$status

$(BUILD)/stress: spec/leases/stress.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(if $(strip $(MYSQL_LIBS)),-DSTRESS_MYSQL) $(if $(strip $(POSTGRESQL_LIBS)),-DSTRESS_POSTGRESQL) \
	  $(BUILT_STORES:%=-DSTRESS_%) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $< $(LIBRARY) $(CLIENT_LIBS) -lm

# --------------------------------------------------------------------- soak

# SECONDS of random use under faults on each STORE, with a checker of its own: see
# spec/soak/soak.h. The SEED repeats the choices, not the interleaving. SOAK: more options, as --leases=yes; else the SEED
# says which store has none. What happened is drawn in build/soak-STORE.html. STORE may name those with leases only, too
# (sqlite redis memcached quorum), without faults of their servers.
STORE ?= file mysql mariadb postgresql
SECONDS ?= 30
SEED ?= $(shell od -An -N3 -tu4 /dev/urandom)
SERVERS := mysql mariadb postgresql redis memcached
# Those of STORE; one of a quorum's stores is Redis.
SERVERS_OF_STORE = $(filter $(SERVERS),$(sort $(STORE:quorum=redis)))
# A target, with them, if there are any.
define WITH_SERVERS
	@[ -z "$(SERVERS_OF_STORE)" ] || spec/support/deps.sh servers
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(if $(SERVERS_OF_STORE),spec/support/servers.sh run "$$directory" $(SERVERS_OF_STORE) --) \
	  $(MAKE) --no-print-directory $(1) SEED=$(strip $(SEED))
endef
SOAK ?=
# What both ask of servers as their administrators.
SERVER_SOURCES := $(wildcard spec/servers/*.c)
SERVER_CFLAGS = -Ispec/servers $(MYSQL_CFLAGS) $(POSTGRESQL_CFLAGS)
SOAK_SOURCES := $(filter-out %/clock.c,$(wildcard spec/soak/*.c)) $(SERVER_SOURCES)
$(BUILD)/soak-clock.so: spec/soak/clock.c
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -fvisibility=default -shared -o $@ $<

$(BUILD)/soak: $(SOAK_SOURCES) $(wildcard spec/soak/*.h) spec/servers/servers.h $(LIBRARY) $(BUILD)/soak-clock.so
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(SERVER_CFLAGS) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $(SOAK_SOURCES) $(LIBRARY) $(CLIENT_LIBS) -lm

# With Lua 5.4 one of the workers is a program in it.
SOAK_LUA := $(if $(filter 5.4,$(LUA_VERSION)),spec/soak/lua/worker.lua)
$(BUILD)/hierlock_spec/soak.so: spec/soak/lua/records.c spec/soak/area.c spec/soak/soak.h csrc/core/hierlock.h
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE -fPIC -shared $(WARNINGS) -Icsrc/core -Ispec/soak $(LUA_CFLAGS) $(CFLAGS) -o $@ $(filter %.c,$^) -lm

.PHONY: soak suite-soak
soak: all
	@spec/support/deps.sh test
	$(call WITH_SERVERS,suite-soak)

# With the servers that the environment names.
suite-soak: all $(BUILD)/soak $(if $(SOAK_LUA),$(BUILD)/hierlock_spec/soak.so)
	@echo 'to repeat what is chosen here: make soak SEED=$(strip $(SEED)) STORE="$(STORE)" SECONDS=$(SECONDS) SOAK="$(SOAK)"'
	@mkdir -p build
	@$(SPEC_ENV) spec/support/on_stores.sh $(BUILD)/soak $(strip $(SEED)) "$(STORE)" --report=build/soak-{store}.html \
	  --control={control} --seconds=$(SECONDS) $(addprefix --lua=,$(SOAK_LUA)) $(SOAK)

# ------------------------------------------------------------------- stress

# SECONDS of leases of many processes at random on each STORE (file, sqlite, redis, memcached, quorum), with
# kills, stops and cuts, and a checker of its own: see spec/leases/stress.c. The SEED repeats the choices, not the
# interleaving. STRESS: more options, as --processes=4. Not redis and quorum at once: they share a server. $(BUILD)/stress DSN
# runs in any space with leases, as of PostgreSQL.
STRESS ?=
.PHONY: stress suite-stress
stress suite-stress: STORE = file sqlite redis memcached
stress: $(BUILD)/stress
	$(call WITH_SERVERS,suite-stress)

# With the servers that the environment names.
suite-stress: $(BUILD)/stress
	@echo 'to repeat what is chosen here: make stress SEED=$(strip $(SEED)) STORE="$(STORE)" SECONDS=$(SECONDS) STRESS="$(STRESS)"'
	@spec/support/on_stores.sh $(BUILD)/stress $(strip $(SEED)) "$(STORE)" --seconds=$(SECONDS) --control={control} $(STRESS)

# ------------------------------------------------------------------- faults

# A fault at every system call of a client, on each STORE: see spec/faults/faults.h. SECONDS=30 of them, chosen by the
# SEED; SECONDS=0: all, which takes many minutes. FAULTS: more options, as --only=kill:acquire.3:exit:0.
FAULTS ?=
FAULTS_SOURCES := $(wildcard spec/faults/*.c) $(SERVER_SOURCES)
$(BUILD)/faults: $(FAULTS_SOURCES) spec/faults/faults.h spec/servers/servers.h $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(SERVER_CFLAGS) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $(FAULTS_SOURCES) $(LIBRARY) $(CLIENT_LIBS) -lm

.PHONY: faults suite-faults
faults: $(BUILD)/faults
	$(call WITH_SERVERS,suite-faults)

# With the servers that the environment names.
suite-faults: $(BUILD)/faults
	@$(WITHOUT_CAS) spec/support/on_stores.sh $(BUILD)/faults $(strip $(SEED)) "$(STORE)" --seconds=$(SECONDS) $(FAULTS)

# --------------------------------------------------------------------- fuzz

# libFuzzer, which comes with clang: SECONDS (60) for each TARGET, with what spec/fuzz/corpus has to begin with. What
# it finds goes on in build/. FUZZ: more of its options. INPUT=file: only that. See spec/fuzz/fuzz.h.
FUZZERS := $(patsubst spec/fuzz/%.c,%,$(wildcard spec/fuzz/*.c))
TARGET ?= $(FUZZERS)
FUZZ ?=
INPUT ?=
FUZZ_CFLAGS := -O1 -g -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined \
               -fno-omit-frame-pointer
.PHONY: fuzz suite-fuzz
fuzz:
	@spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh fuzz
	@$(MAKE) --no-print-directory -s suite-fuzz VARIANT=fuzz CC=clang CFLAGS='$(FUZZ_CFLAGS)' \
	  SECONDS=$(if $(filter file,$(origin SECONDS)),60,$(SECONDS))

suite-fuzz: $(TARGET:%=$(BUILD)/fuzz_%)
	@FUZZ='$(FUZZ)' INPUT='$(INPUT)' $(WITHOUT_CAS) spec/fuzz/run.sh $(BUILD) $(SECONDS) $(TARGET)

# Those that come by Lua have one inside, with the binding.
FUZZ_LUA := $(BUILD)/fuzz_values $(BUILD)/fuzz_command
$(FUZZ_LUA): HL_CFLAGS += $(LUA_CFLAGS)
$(FUZZ_LUA): FUZZ_LIBS = $(call objects,$(BINDING)) $(shell $(PKG_CONFIG) --libs $(notdir $(LUA)))
$(FUZZ_LUA): $(call objects,$(BINDING)) spec/fuzz/state.h

$(BUILD)/fuzz_%: spec/fuzz/%.c spec/fuzz/fuzz.h $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) -Icsrc/stores/file -Icsrc/stores/mysql $(MYSQL_CFLAGS) $(CPPFLAGS) $(CFLAGS) -fsanitize=fuzzer \
	  $(LDFLAGS) -o $@ $< $(FUZZ_LIBS) $(LIBRARY) $(CLIENT_LIBS) -lm

# ------------------------------------------------------------------ planted

# Bugs, planted one at a time, and the checks that find them: BUG="keeper-stopped …", all unless said;
# PLANTED=--list, --table, --help; LIMIT.
BUG ?=
PLANTED ?=
.PHONY: planted
planted:
	@spec/support/deps.sh build $(LUA) luajit
	@spec/support/deps.sh test $(LUA) luajit
	@spec/support/deps.sh servers
	@LUA=$(LUA) spec/planted/run.sh $(PLANTED) $(BUG)

# ------------------------------------------------------------------ mutants

# N lines of csrc and lua, chosen by SEED, each with one thing changed; FILE="csrc/core/lease.c …": of those. See
# spec/mutants/run.lua.
N ?= 20
FILE ?=
.PHONY: mutants suite-mutants
mutants:
	@spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh test $(LUA)
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	spec/support/servers.sh run "$$directory" -- $(MAKE) --no-print-directory suite-mutants SEED=$(strip $(SEED))

# With the servers that the environment names. In a copy of what git knows, with the objects that there are.
suite-mutants: spec-built
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && mkdir "$$directory/tree" && \
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp -a --parents --target-directory="$$directory/tree" && \
	mkdir "$$directory/tree/build" && cp -a $(BUILD) "$$directory/tree/build" && \
	HIERLOCK_REQUIRE="mysql mariadb postgresql redis memcached php" MUTANTS_WORK="$$directory" MAKEFLAGS= LUA=$(LUA) $(LUA_BINARY) spec/mutants/run.lua $(N) $(strip $(SEED)) $(FILE)

# -------------------------------------------------------------------- bench

# A client for each peer whose library is there; the others are named as not run.
BENCH_SVG ?= $(BUILD)/performance.svg
BENCH_LOAD_SVG ?= $(BUILD)/load.svg
BENCH_CLIENTS := flock memcached $(if $(strip $(MYSQL_LIBS)),bare) $(if $(strip $(SQLITE_LIBS)),sqlite) \
                 $(if $(shell $(PKG_CONFIG) --exists libpq 2>/dev/null && echo yes),postgresql) \
                 $(if $(shell $(PKG_CONFIG) --exists hiredis 2>/dev/null && echo yes),redis)
$(BUILD)/bench/bare: BENCH_LIBRARIES = $(MYSQL_CFLAGS) $(MYSQL_LIBS)
$(BUILD)/bench/postgresql: BENCH_LIBRARIES = $(shell $(PKG_CONFIG) --cflags --libs libpq)
$(BUILD)/bench/sqlite: BENCH_LIBRARIES = $(SQLITE_CFLAGS) $(SQLITE_LIBS)
$(BUILD)/bench/redis: BENCH_LIBRARIES = -I$(BUILD)/redis $(shell $(PKG_CONFIG) --cflags --libs hiredis)
$(BUILD)/bench/redis: $(BUILD)/redis/scripts.h

$(BUILD)/bench/%: bench/%.c bench/client.c bench/client.h
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE -Wall -Wextra $(CFLAGS) -o $@ bench/client.c $< $(BENCH_LIBRARIES)

$(BUILD)/bench/line: bench/line.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE -Wall -Wextra $(CFLAGS) -o $@ $<

.PHONY: bench
# BENCH="embedded mysql mariadb postgresql redis sqlite memcached leases line waiting peers load": which; BENCH_ROUNDS: how many rounds;
# BENCH_SVG, BENCH_LOAD_SVG: where the pictures go.
bench: all $(addprefix $(BUILD)/bench/,line $(BENCH_CLIENTS))
	@spec/support/deps.sh demo
	@spec/support/deps.sh servers
	@ulimit -n 65536 2>/dev/null || true; \
	directory=$$(mktemp -d) && files=$$(mktemp -d /dev/shm/hierlock-bench-XXXXXX) && \
	trap 'rm -rf "$$directory" "$$files"' EXIT && \
	$(SPEC_ENV) BENCH_CLIENTS="$(CURDIR)/$(BUILD)/bench" BENCH_FILES="$$files" BENCH_SQLITE="$$directory" BENCH_SVG="$(BENCH_SVG)" \
	  BENCH_LOAD_SVG="$(BENCH_LOAD_SVG)" \
	  spec/support/servers.sh run "$$directory" -- \
	  bench/servers.sh $(LUA_BINARY) bench/run.lua $(BENCH)

$(BUILD)/clients: bench/clients.c $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(HL_CFLAGS) $(CFLAGS) $(MYSQL_CFLAGS) -o $@ $< $(LIBRARY) $(CLIENT_LIBS) -lm

.PHONY: bench-nginx
# With LUA=luajit; needs Debian's nginx, libnginx-mod-http-lua and wrk.
bench-nginx: all $(BUILD)/clients
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && store=$$(mktemp -d /dev/shm/hierlock-bench-XXXXXX) && \
	trap 'rm -rf "$$directory" "$$store"' EXIT && export HIERLOCK_SPEC_DIRECTORY="$$store" && \
	$(SPEC_ENV) BENCH_CLIENTS="$(CURDIR)/$(BUILD)/clients" spec/support/servers.sh run "$$directory" -- \
	  $(LUA_BINARY) bench/nginx.lua

.PHONY: bench-shop
# With LUA=luajit: the ways of examples/shop beside each other. BENCH_SHOP_SVG: where the picture goes.
bench-shop: export BENCH_SHOP_SVG ?= $(BUILD)/shop.svg
bench-shop: all
	@spec/support/deps.sh test $(LUA)
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && store=$$(mktemp -d /dev/shm/hierlock-bench-XXXXXX) && \
	trap 'rm -rf "$$directory" "$$store"' EXIT && export HIERLOCK_SPEC_DIRECTORY="$$store" && \
	$(SPEC_ENV) spec/support/servers.sh run "$$directory" mysql mariadb postgresql -- $(LUA_BINARY) bench/shop.lua

# -------------------------------------------------------------- screenshots

# The pictures of docs/checkout.md and docs/exclusive-control.md, of examples in a browser, and of docs/operations.md, of the command in
# a terminal.
.PHONY: screenshots suite-screenshots
screenshots:
	@spec/support/deps.sh build luajit
	@spec/support/deps.sh test luajit
	@spec/support/deps.sh browser
	@$(MAKE) --no-print-directory -s suite-screenshots LUA=luajit

suite-screenshots: all
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(SPEC_ENV) HIERLOCK_SPEC_DIRECTORY="$$directory" $(LUA_BINARY) spec/support/screenshots.lua && \
	$(SPEC_ENV) HIERLOCK_SPEC_DIRECTORY="$$directory" $(LUA_BINARY) spec/support/screenshots_shop.lua && \
	$(SPEC_ENV) HIERLOCK_SPEC_DIRECTORY="$$directory" $(LUA_BINARY) spec/support/screenshots_top.lua

# --------------------------------------------------------- demo, test, lint

.PHONY: demo test test-luas suite lint asan tsan valgrind collector test-bare test-packaging test-libmysqlclient
demo:
	@HIERLOCK_WITHOUT_CLIENTS=1 spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh demo
	@$(MAKE) --no-print-directory -s build/demo/hierlock/core.so BUILD=build/demo
	@LUA_PATH="$(CURDIR)/lua/?.lua;$(CURDIR)/lua/?/init.lua;;" LUA_CPATH="$(CURDIR)/build/demo/?.so;;" \
	  HIERLOCK_LUA=$(LUA_BINARY) $(LUA_BINARY) examples/demo.lua $(DEMO)

# MYSQL_DSN=user:password@tcp(host:port)/database: on a server of yours instead.
test:
	@spec/support/deps.sh build $(LUAS)
	@spec/support/deps.sh test $(LUAS)
ifdef MYSQL_DSN
	@$(MAKE) --no-print-directory suite
else
	@spec/support/deps.sh servers
	@HIERLOCK_REQUIRE="mysql mariadb postgresql redis memcached nginx php" $(MAKE) --no-print-directory suite
endif

# On further Luas: without the core's own tests, and without the specs that look at servers, at a store, or at the core
# beside them, which no Lua reaches: what the binding passes on, others say.
SERVER_SPECS := assumptions boot command_doctor command_kill command_leases command_ps_cost compatibility crowd deadlock% exit \
                matrix memcached memory mysql% postgresql% quorum% redis% silence sqlite storm structure symfony% update \
                waiting_trouble
# And on the first of them alone: leases, and what is Lua above the binding.
ONCE_SPECS := command command_% docs leases prometheus rows
test-luas:
	@$(MAKE) --no-print-directory test LUAS="$(LUAS)" CORE_TESTS= ONCE='$(ONCE_SPECS:%=spec/%_spec.lua)' \
	  SPECS='$(filter-out $(SERVER_SPECS:%=spec/%_spec.lua),$(SPECS))'

# The core's own tests, and the specs on each Lua, side by side. ONCE: specs for the first Lua alone.
suite:
	@$(MAKE) --no-print-directory -s -j $$(nproc) spec-built $(CORE_TESTS)
	@for lua in $(LUAS); do $(MAKE) --no-print-directory -s -j $$(nproc) LUA=$$lua spec-built || exit 1; done
	@spec/support/suite.sh $(addprefix core:,$(CORE_TESTS)) \
	  $(addprefix $(firstword $(LUAS)):,$(SPECS)) \
	  $(foreach lua,$(wordlist 2,9,$(LUAS)),$(addprefix $(lua):,$(filter-out $(ONCE),$(SPECS))))

# make install, LuaRocks for every Lua, pkg-config, client libraries everywhere, docker-compose.yml.
test-packaging:
	@spec/support/deps.sh build lua5.1 lua5.2 lua5.3 lua5.4 luajit
	@spec/support/deps.sh test
	@spec/support/deps.sh servers
	@spec/support/deps.sh packaging
	@HIERLOCK_REQUIRE="mysql mariadb postgresql redis" $(MAKE) --no-print-directory suite SPECS=spec/packaging_spec.lua CORE_TESTS= LIMIT=2700

# README.md's two commands on a fresh Debian 12, with nothing but make: what they need they must get. It
# takes what is committed.
test-bare:
	@spec/support/deps.sh bare
	@spec/support/root.sh alone bare bookworm sh -ec 'make demo; make test'

# The specs that come to a server again, on Oracle's libmysqlclient and Lua as Debian unstable has them. The servers,
# too, are started in that root: MariaDB, MySQL and PostgreSQL are the newer ones, and Valkey stands for Redis. So are
# PHP and Symfony Lock.
LIBMYSQLCLIENT_SPECS := assumptions loop pending postgresql postgresql_leases redis stores \
                        $(patsubst spec/%_spec.lua,%,$(wildcard spec/mysql_*spec.lua))
test-libmysqlclient:
	@spec/support/deps.sh libmysqlclient
	@HIERLOCK_REQUIRE="mysql mariadb postgresql redis php" HIERLOCK_REDIS_SERVER=valkey-server spec/support/root.sh run libmysqlclient sid \
	  $(MAKE) --no-print-directory suite-libmysqlclient LUA=lua5.4 LUAS=lua5.4 VARIANT=libmysqlclient \
	    SPECS='$(LIBMYSQLCLIENT_SPECS:%=spec/%_spec.lua)'

# Inside. Nothing else is to be tested by mistake.
LIBMYSQLCLIENT_PLUGIN := $(BUILD)/plugin/mysql_native_password.so
.PHONY: suite-libmysqlclient
suite-libmysqlclient: all $(LIBMYSQLCLIENT_PLUGIN)
	@echo "libmysqlclient $$(mysql_config --version), $$($(LUA) -v)"
	@ldd $(MYSQL_SO) | grep -q libmysqlclient
	@LIBMYSQL_PLUGIN_DIR="$(CURDIR)/$(BUILD)/plugin" $(MAKE) --no-print-directory suite
	@$(MAKE) --no-print-directory -s -j $$(nproc) binding LUA=lua5.5 MYSQL_LIBS= POSTGRESQL_LIBS=

# What tells of the binding on a Lua for which Debian has no luv: without what our other specs stand on.
.PHONY: binding
binding: all
	@$(LUA) -v && $(SPEC_ENV) $(LUA_BINARY) /usr/bin/busted --no-auto-insulate spec/plan_spec.lua
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	  HIERLOCK_DSN="file:$$directory" $(SPEC_ENV) $(LUA_BINARY) examples/nightly.lua screen a1

$(BUILD)/plugin/%.so: spec/support/libmysqlclient/%.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -fPIC -shared $(WARNINGS) -Wno-pedantic $(MYSQL_CFLAGS) $(CFLAGS) -o $@ $< -lcrypto

lint:
	@spec/support/deps.sh lint
	luacheck --no-color -q lua spec bench examples
	mandoc -T lint -W warning docs/*.1
	clang-format --dry-run --Werror $$(git ls-files '*.c' '*.h')
	$(MAKE) --no-print-directory -s -j $$(nproc) all VARIANT=lint CC=clang CFLAGS='-O1 -Werror -Wthread-safety -Wthread-safety-beta'
	$(MAKE) --no-print-directory -s -j $$(nproc) all VARIANT=lint-gcc CC=gcc CFLAGS='-O2 -Werror'
	cppcheck -q --std=c11 --enable=warning,performance,portability --inline-suppr \
	  --suppress=missingIncludeSystem --error-exitcode=1 -D_GNU_SOURCE -Icsrc/core -Icsrc/lua -I$(BUILD)-lint/sql csrc
	@echo clang-tidy
	@printf '%s\n' $(CORE) $(BINDING) $(MYSQL) $(MYSQL_BINDING) $(POSTGRESQL) $(POSTGRESQL_BINDING) \
	  $(foreach store,$(BUILT_STORES),$($(store)) $($(store)_BINDING)) | xargs -P $$(nproc) -n 4 bash -o pipefail -c ' \
	  clang-tidy --quiet --warnings-as-errors="*" "$$@" -- \
	    $(HL_CFLAGS) $(LUA_CFLAGS) $(MYSQL_CFLAGS) $(POSTGRESQL_CFLAGS) $(foreach store,$(BUILT_STORES),$($(store)_CFLAGS)) -Icsrc/lua -Icsrc/stores/mysql -Icsrc/stores/postgresql -Icsrc/stores/redis \
	    -I$(BUILD)-lint/redis -I$(BUILD)-lint/sql 2>&1 | { grep -v "warnings generated" || true; }' bash

# What the locks promise, proved on models of the code by spin; and that each model fails when a bug is planted
# in it. MODEL=queue: that one; LANES: how many runs at a time, each of at most 1.8 GB.
.PHONY: model
model:
	@spec/support/deps.sh model
	@spec/model/run.sh

# AddressSanitizer must be loaded before everything else, and a Lua that is not
# built with it leaks at its end by design. A small quarantine, as specs look at how
# much memory the process has.
ASAN_CFLAGS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
ASAN_ENV = LD_PRELOAD="$(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)" \
           ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1
# The C tests, and the specs that come to all parts of our C code.
ASAN_SPECS := any dsn embedded error exit extend finalizer fork hooks loop memcached memory misuse mysql mysql_connect mysql_leases \
              mysql_pool mysql_silence mysql_trouble pending plan postgresql postgresql_leases quorum quorum_tables redis redis_cluster \
              redis_sentinel redis_tls sqlite update waiting_trouble
asan:
	@spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh test
	@spec/support/deps.sh servers
	@HIERLOCK_REQUIRE="mysql mariadb postgresql redis" \
	  $(MAKE) --no-print-directory suite LUAS=$(LUA) LIMIT=900 VARIANT=asan CFLAGS='$(ASAN_CFLAGS)' \
	    SANITIZER_ENV='$(ASAN_ENV)' SPECS='$(ASAN_SPECS:%=spec/%_spec.lua)'

# The reference of the Lua interface. LDoc says on its output whatever it merges.
.PHONY: docs
docs:
	@spec/support/deps.sh docs $(LUA)
	@mkdir -p build
	@$(LUA_BINARY) /usr/bin/ldoc --fatalwarnings . >build/ldoc.log || { cat build/ldoc.log; exit 1; }
	@echo build/docs/index.html

# ThreadSanitizer, on what our threads do: the keeper, several Lua states, and in
# C many threads on one manager. Left out are specs without any (plan, dsn ...), and
# memory_spec, as the sanitizer's own memory is more than what it looks at; and what
# starts threads in the child of a process with threads, which it does not know. Reports
# are also those of the processes that specs start. Its shadow does not fit where
# addresses are very random: hence setarch -R.
# Seldom, it ends a program as it computes a size that is no size.
TSAN_OWN := ThreadSanitizer failed to allocate
TSAN_CFLAGS := -O1 -g -fsanitize=thread
TSAN_SPECS := fork extend manager pending crowd loop mysql mysql_connect mysql_pool mysql_trouble waiting_trouble \
              postgresql redis scenarios with
tsan:
	@spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh test
	@spec/support/deps.sh servers
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && mkdir "$$directory/reports" && \
	export TSAN_LUA=$(LUA) TSAN_LIBRARY="$(shell $(CC) -print-file-name=libtsan.so)" && \
	export TSAN_OPTIONS="die_after_fork=0 second_deadlock_stack=1 log_path=$$directory/reports/report \
	  suppressions=$(CURDIR)/spec/support/tsan.supp" && \
	HIERLOCK_REQUIRE="mysql mariadb postgresql redis" TOOL_ENDS=1 \
	  $(MAKE) --no-print-directory suite LUAS=$(LUA) LIMIT=900 VARIANT=tsan CFLAGS='$(TSAN_CFLAGS)' \
	    WRAPPER='setarch -R' LUA_BINARY="$(CURDIR)/spec/support/tsan-lua" \
	    BUSTED_FLAGS="--filter-out='costs at most two connections, and 4 KiB' --filter-out='own cancelled wait does not concern'" \
	    SPECS='$(TSAN_SPECS:%=spec/%_spec.lua)'; \
	status=$$?; grep -rL "$(TSAN_OWN)" "$$directory/reports" | xargs -r cat | grep . && exit 1; exit $$status

# Valgrind's memcheck, which knows what is not initialised: the core, and those specs
# that come to every file of the binding and of the stores. Left out is what depends
# on time, of which it needs twenty times as much: stores, extend, scenarios,
# mysql_trouble ..., one of mysql, and of the core test_threads; test_memory, as it
# brings an allocator; test_leases, as it traces processes; and LuaJIT, whose code it does not see through.
VALGRIND_SPECS := misuse with manager embedded mysql mysql_connect postgresql redis
valgrind:
	@spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh test
	@spec/support/deps.sh valgrind
	@spec/support/deps.sh servers
	@HIERLOCK_REQUIRE="mysql mariadb postgresql redis" \
	  $(MAKE) --no-print-directory suite LUAS=$(LUA) WRAPPER=spec/support/valgrind.sh \
	    BUSTED_FLAGS="--filter-out='timeouts that change from call to call'" \
	    SPECS='$(VALGRIND_SPECS:%=spec/%_spec.lua)' LIMIT=1800 \
	    CORE_TESTS='$(filter-out %/test_threads %/test_memory %/test_leases,$(CORE_TESTS))'

# A whole collection wherever Lua may collect, inside of the binding too, and
# AddressSanitizer to see what is used afterwards. Specs that do much in Lua itself
# would need hours; these come to every function of the binding.
COLLECTOR_SPECS := error with manager embedded extend mysql mysql_pool postgresql redis
collector:
	@spec/support/deps.sh build $(LUA)
	@spec/support/deps.sh test
	@spec/support/deps.sh servers
	@HIERLOCK_REQUIRE="mysql mariadb postgresql redis" \
	  $(MAKE) --no-print-directory suite LUAS=$(LUA) CORE_TESTS= LIMIT=900 VARIANT=asan CFLAGS='$(ASAN_CFLAGS)' SANITIZER_ENV='$(ASAN_ENV)' \
	    BUSTED_FLAGS=--helper=spec/support/collector.lua SPECS='$(COLLECTOR_SPECS:%=spec/%_spec.lua)'

clean:
	rm -rf build

help:
	@echo 'make            build for $$LUA (now: $(LUA)) into $(BUILD)'
	@echo 'make demo       the seven scenarios on the embedded store, live'
	@echo 'make test       all specs, on throw-away servers; LUAS="lua5.4 lua5.1 luajit" LANES= SEED= LIMIT='
	@echo 'make test-luas  on further Luas: without what looks at servers alone; LUAS="lua5.1 luajit"'
	@echo 'make spec       SPECS="spec/…": in one process, on the servers that the environment names'
	@echo 'make install    what was built, to PREFIX=$(PREFIX); make uninstall'
	@echo 'make bench      how fast it is, and beside what others lock with, measured in one run; BENCH="redis sqlite memcached":'
	@echo '                those; or embedded, mysql, mariadb, postgresql, leases, line, waiting, peers, load'
	@echo 'make lint       luacheck, mandoc, cppcheck, clang-tidy, -Werror'
	@echo 'make model      the models of spec/model under spin; MODEL=acquire, lease, queue, line, records or ledger: that one'
	@echo 'make asan       the specs under AddressSanitizer and UBSan'
	@echo 'make docs       the reference of the Lua interface, into build/docs'
	@echo 'make screenshots   the pictures of docs/checkout.md, docs/exclusive-control.md and docs/operations.md'
	@echo 'make tsan       the specs with threads under ThreadSanitizer'
	@echo 'make valgrind   the core and the binding under memcheck'
	@echo 'make collector  the binding under a collector that always runs'
	@echo 'make test-bare             the demo and the specs on a fresh Debian 12'
	@echo 'make test-packaging        installing in every way, for every Lua'
	@echo 'make test-libmysqlclient   the specs that come to a server, on Oracle'"'"'s client library'
	@echo 'make soak       random use under faults, and a checker; SECONDS=30 SEED= STORE="file mysql mariadb postgresql"'
	@echo 'make stress     leases of many processes at random, and a checker; SECONDS=30 SEED= STORE="file sqlite redis memcached"'
	@echo 'make faults     kill, stop, failure at every system call of a client; SECONDS=30 (0: all of them) SEED= STORE='
	@echo 'make fuzz       bytes at random, as libFuzzer learns what they reach; TARGET="dsn …" SECONDS=60 FUZZ= INPUT='
	@echo 'make planted    bugs, planted one at a time, and which check finds each; BUG="keeper-stopped …"'
	@echo 'make mutants    one thing changed in lines chosen at random, and which check finds each; N=20 SEED= FILE="csrc/…"'
	@echo 'make clean      remove build/'
