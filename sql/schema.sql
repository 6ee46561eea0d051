-- The two tables of hierlock, for MySQL 8.0+ and MariaDB 10.6+.
--
-- hier_lock_buckets has one row for each bucket of each level. Its rows are
-- only ever locked, never changed: acquiring and releasing write nothing.
CREATE TABLE IF NOT EXISTS hier_lock_buckets (
  level  TINYINT NOT NULL,
  bucket INT NOT NULL,
  PRIMARY KEY (level, bucket)
) ENGINE=InnoDB;

-- hier_lock_meta says what the table of that name was filled for: programs that
-- count other buckets, or name other levels, would lock other rows, and are
-- refused. Where it has no row, 10000000 buckets for each of
-- user,account,resource are assumed.
CREATE TABLE IF NOT EXISTS hier_lock_meta (
  table_name VARCHAR(64) NOT NULL PRIMARY KEY,
  buckets    INT UNSIGNED NOT NULL,
  levels     VARCHAR(1100) NOT NULL
) ENGINE=InnoDB;
