-- Fills hier_lock_buckets by hand; `hierlock provision` does the same, with
-- progress, and `hierlock provision --dry-run` prints it as plain statements.
-- After schema.sql, in the client mysql or mariadb:
--
--     SOURCE sql/provision.sql
--     SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
--     CALL hier_lock_provision(10000000, 'user,account,resource', 50000);
--
-- (Not on a server with binlog_format=STATEMENT, which inserts nothing in READ
-- COMMITTED: leave REPEATABLE READ there. Then a later call, which fills what is
-- missing, waits for rows that are locked.)
--
-- That makes buckets 0 .. 9999999 of three levels, 50000 rows to a transaction.
-- It may be interrupted and called again: rows that are there stay as they are,
-- also when somebody holds a lock on one. How far it is, from another session:
--
--     SELECT level, MAX(bucket) FROM hier_lock_buckets GROUP BY level;
--
-- Needs CREATE ROUTINE, ALTER ROUTINE, EXECUTE, SELECT, INSERT. For a table of
-- another name, replace hier_lock_buckets in both files. Afterwards:
-- DROP PROCEDURE hier_lock_provision.

DROP PROCEDURE IF EXISTS hier_lock_provision;

DELIMITER //
CREATE PROCEDURE hier_lock_provision(
  IN wanted_buckets INT UNSIGNED, IN wanted_levels VARCHAR(1100), IN chunk INT UNSIGNED)
BEGIN
  DECLARE this_level, level_count, there, inserted INT DEFAULT 0;
  DECLARE first_bucket, last_bucket BIGINT;

  IF wanted_buckets NOT BETWEEN 1 AND 2147483647 OR chunk NOT BETWEEN 1 AND 1000000 THEN
    SIGNAL SQLSTATE '45000'
      SET MESSAGE_TEXT = 'buckets must be 1 to 2147483647, chunk 1 to 1000000';
  END IF;

  -- Programs that disagree about buckets or levels would lock different rows. A
  -- table with rows and without a record is one of the defaults.
  IF NOT EXISTS (SELECT 1 FROM hier_lock_buckets)
     OR (wanted_buckets = 10000000 AND wanted_levels = 'user,account,resource') THEN
    INSERT IGNORE INTO hier_lock_meta (table_name, buckets, levels)
    VALUES ('hier_lock_buckets', wanted_buckets, wanted_levels);
  END IF;
  IF NOT EXISTS (SELECT 1 FROM hier_lock_meta
                 WHERE table_name = 'hier_lock_buckets'
                   AND buckets = wanted_buckets AND levels = wanted_levels) THEN
    SIGNAL SQLSTATE '45000'
      SET MESSAGE_TEXT = 'hier_lock_buckets is for other buckets or levels: see hier_lock_meta';
  END IF;

  SET level_count = 1 + CHAR_LENGTH(wanted_levels) - CHAR_LENGTH(REPLACE(wanted_levels, ',', ''));
  WHILE this_level < level_count DO
    SET first_bucket = 0;
    WHILE first_bucket < wanted_buckets DO
      SET last_bucket = LEAST(first_bucket + chunk, wanted_buckets) - 1;
      SELECT COUNT(*) INTO there FROM hier_lock_buckets
      WHERE level = this_level AND bucket BETWEEN first_bucket AND last_bucket;

      -- Numbers up to 999 crossed with themselves, as MySQL ends a recursive query
      -- after 1,000. In the order of the primary key: in any other, pages are
      -- split, and the table becomes nearly twice as large.
      IF there = 0 THEN
        INSERT INTO hier_lock_buckets (level, bucket)
        WITH RECURSIVE digit (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM digit WHERE n < 999)
        SELECT this_level, first_bucket + thousand.n * 1000 + one.n AS bucket
        FROM digit AS thousand, digit AS one
        WHERE thousand.n <= (last_bucket - first_bucket) DIV 1000
          AND first_bucket + thousand.n * 1000 + one.n <= last_bucket
        ORDER BY bucket;
        SET inserted = ROW_COUNT();

      -- Only what is missing. (INSERT IGNORE would wait for rows that are locked.)
      ELSEIF there <= last_bucket - first_bucket THEN
        INSERT INTO hier_lock_buckets (level, bucket)
        WITH RECURSIVE digit (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM digit WHERE n < 999)
        SELECT this_level, first_bucket + thousand.n * 1000 + one.n AS bucket
        FROM digit AS thousand, digit AS one
        WHERE thousand.n <= (last_bucket - first_bucket) DIV 1000
          AND first_bucket + thousand.n * 1000 + one.n <= last_bucket
          AND NOT EXISTS (
            SELECT 1 FROM hier_lock_buckets AS present
            WHERE present.level = this_level
              AND present.bucket = first_bucket + thousand.n * 1000 + one.n)
        ORDER BY bucket;
        SET inserted = ROW_COUNT();
      ELSE
        SET inserted = 0;
      END IF;
      -- MariaDB ends a recursion that is too deep without an error.
      IF inserted <> last_bucket - first_bucket + 1 - there THEN
        SIGNAL SQLSTATE '45000'
          SET MESSAGE_TEXT = 'rows were left out: set max_recursive_iterations to 1000';
      END IF;
      SET first_bucket = last_bucket + 1;
    END WHILE;
    SET this_level = this_level + 1;
  END WHILE;
END //
DELIMITER ;
