-- Makes the tables of leases on PostgreSQL, by hand; `hierlock provision --leases` and a program that may create tables
-- do the same. Each role that uses leases needs the privileges at the end.
BEGIN;
-- One transaction at a time makes them, and others see all or nothing of it.
SELECT pg_advisory_xact_lock(1751999844, 1952409964);
-- A record for each lease. What programs write is bytes, of any encoding.
CREATE TABLE IF NOT EXISTS public.hier_lock_leases (
  id uuid PRIMARY KEY, holder uuid NOT NULL, secret bytea NOT NULL, till timestamptz NOT NULL, token bigint NOT NULL,
  shared boolean NOT NULL, owner bytea NOT NULL, path bytea NOT NULL, label bytea NOT NULL, application bytea NOT NULL,
  host bytea NOT NULL, pid bigint NOT NULL, since timestamptz NOT NULL, turn bigint NOT NULL DEFAULT 0,
  revoked timestamptz, revoked_by bytea, reason bytea) WITH (fillfactor=50);
-- The rows that leases lock.
CREATE TABLE IF NOT EXISTS public.hier_lock_lease_rows (
  key bigint NOT NULL, exclusive boolean NOT NULL, id uuid NOT NULL, PRIMARY KEY (key, id));
CREATE INDEX IF NOT EXISTS hier_lock_lease_rows_id ON public.hier_lock_lease_rows (id);
-- A request below a node looks for exclusive rows of the node alone: of shared ones there are as many as leases below it.
CREATE INDEX IF NOT EXISTS hier_lock_lease_rows_exclusive ON public.hier_lock_lease_rows (key) WHERE exclusive;
-- 2: there may be leases; 1: there are none. A program that is about to record a lease has this lock, shared.
CREATE SEQUENCE IF NOT EXISTS public.hier_lock_gate MINVALUE 1 MAXVALUE 2;
SELECT pg_advisory_xact_lock(1751999844, 1952409963);
SELECT setval('public.hier_lock_gate', CASE WHEN EXISTS (SELECT FROM public.hier_lock_lease_rows) THEN 2 ELSE 1 END);
COMMIT;

-- GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO ROLE;
-- GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO ROLE;
