-- PostgreSQL needs nothing of this: locks are advisory locks, and no table is made.
--
-- A sequence for fencing tokens, by an administrator, once for each database. Without it tokens are made of the
-- server's clock, and grow as long as that is not set back. With it they grow also then, from one start of the server
-- to the next; but where a process of the server crashes, and the server goes on without a restart, those of the last
-- second may be given again. Tokens of the sequence are greater than those of the clock. Programs see it when they
-- connect: start them again afterwards.
CREATE SEQUENCE public.hier_lock_token;
GRANT USAGE ON SEQUENCE public.hier_lock_token TO PUBLIC;

-- What programs with other levels are told, instead of excluding nobody. Whoever does not say `levels`, takes these.
COMMENT ON SEQUENCE public.hier_lock_token IS 'hierlock levels: user,account,resource';
