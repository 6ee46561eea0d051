-- What the tests' user may do besides everything in its own database: see who
-- holds a lock. For servers.sh, docker-compose.yml and CI.
GRANT PROCESS ON *.* TO testuser@'%';
GRANT SELECT ON performance_schema.* TO testuser@'%';
