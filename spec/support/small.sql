-- A table for trials, after schema.sql and provision.sql; every program then opens
-- with { buckets = 10000 }.
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
CALL hier_lock_provision(10000, 'user,account,resource', 50000);
