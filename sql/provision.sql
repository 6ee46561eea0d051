-- Fills hier_lock_buckets with buckets 0 .. @buckets - 1 of the three default
-- levels, and records it. Run schema.sql first, then, in one session:
--
--     SET @buckets = 10000000;
--     SOURCE sql/provision.sql
--
-- Digits crossed with digits: MySQL stops a recursive query after 1,000 rows.
-- It may be run again after an interruption; rows that are there stay.
INSERT IGNORE INTO hier_lock_buckets (level, bucket)
WITH
  level AS (SELECT 0 AS level UNION ALL SELECT 1 UNION ALL SELECT 2),
  digit AS (SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2
            UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5
            UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8
            UNION ALL SELECT 9),
  d0 AS (SELECT d               AS n FROM digit),
  d1 AS (SELECT d * 10          AS n FROM digit WHERE d * 10          < @buckets),
  d2 AS (SELECT d * 100         AS n FROM digit WHERE d * 100         < @buckets),
  d3 AS (SELECT d * 1000        AS n FROM digit WHERE d * 1000        < @buckets),
  d4 AS (SELECT d * 10000       AS n FROM digit WHERE d * 10000       < @buckets),
  d5 AS (SELECT d * 100000      AS n FROM digit WHERE d * 100000      < @buckets),
  d6 AS (SELECT d * 1000000     AS n FROM digit WHERE d * 1000000     < @buckets),
  d7 AS (SELECT d * 10000000    AS n FROM digit WHERE d * 10000000    < @buckets),
  d8 AS (SELECT d * 100000000   AS n FROM digit WHERE d * 100000000   < @buckets),
  d9 AS (SELECT d * 1000000000  AS n FROM digit WHERE d * 1000000000  < @buckets)
SELECT level.level,
       d0.n + d1.n + d2.n + d3.n + d4.n + d5.n + d6.n + d7.n + d8.n + d9.n
FROM level, d9, d8, d7, d6, d5, d4, d3, d2, d1, d0
WHERE d0.n + d1.n + d2.n + d3.n + d4.n + d5.n + d6.n + d7.n + d8.n + d9.n
      < @buckets;

REPLACE INTO hier_lock_meta (table_name, buckets, levels)
VALUES ('hier_lock_buckets', @buckets, 'user,account,resource');
