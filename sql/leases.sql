-- Gives the space hier_lock_buckets leases, by hand; `hierlock provision --leases` does the same. For MySQL
-- 8.0+ and MariaDB 10.6+, with binlog_format ROW or MIXED. After schema.sql and provision.sql, in this order:
--
-- What leases are recorded in. hier_lock_leases has one row for each lease, hier_lock_leased one for each
-- bucket that it locks.
CREATE TABLE IF NOT EXISTS hier_lock_leases (
  id          BINARY(16) NOT NULL PRIMARY KEY,
  secret      BINARY(16) NOT NULL,            -- who knows what this is a hash of may take the lease over
  holder      BINARY(16) NOT NULL,            -- which handle has it now
  till        DATETIME(6) NOT NULL,           -- UTC
  turn        BIGINT UNSIGNED NOT NULL,       -- of its holder's last refresh: one that comes late changes nothing
  since       DATETIME(6) NOT NULL,           -- UTC
  token       BIGINT UNSIGNED NOT NULL,
  mode        TINYINT NOT NULL,               -- 1: shared
  owner       VARBINARY(127) NOT NULL,
  label       VARBINARY(255) NOT NULL,
  path        VARBINARY(255) NOT NULL,
  application VARBINARY(255) NOT NULL,
  host        VARBINARY(255) NOT NULL,
  pid         BIGINT NOT NULL,
  revoked     TINYINT NOT NULL,               -- 1: it locks nothing any more, and its holder may ask why
  revoked_by  VARBINARY(63) NULL,
  reason      VARBINARY(127) NULL,
  KEY (owner),
  KEY (till)
) ENGINE=InnoDB;

CREATE TABLE IF NOT EXISTS hier_lock_leased (
  level  TINYINT NOT NULL,
  bucket INT NOT NULL,
  x      TINYINT NOT NULL,                    -- 1: exclusive
  id     BINARY(16) NOT NULL,
  PRIMARY KEY (level, bucket, x, id),
  KEY (id)
) ENGINE=InnoDB;

-- Where there may be leases: one row for some thousandths of the roots. Whoever locks reads the one of his root.
-- One that was missing says that there may be some, if there are any at all.
CREATE TABLE IF NOT EXISTS hier_lock_gate (
  g SMALLINT UNSIGNED NOT NULL PRIMARY KEY,
  n TINYINT NOT NULL
) ENGINE=InnoDB;

INSERT INTO hier_lock_gate (g, n)
WITH RECURSIVE digit (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM digit WHERE n < 255)
SELECT high.n * 256 + low.n AS g, EXISTS (SELECT 1 FROM hier_lock_leased)
FROM digit AS high, digit AS low
WHERE NOT EXISTS (SELECT 1 FROM hier_lock_gate AS there WHERE there.g = high.n * 256 + low.n)
ORDER BY g;

-- From here on programs that know of no leases are refused: no level has a name with a colon.
UPDATE hier_lock_meta SET levels = CONCAT('leases:', levels)
WHERE table_name = 'hier_lock_buckets' AND levels NOT LIKE 'leases:%';

-- From here on programs that have connected before fail, instead of excluding nobody. Waits for those who
-- hold locks.
RENAME TABLE hier_lock_buckets TO hier_lock_nodes;
