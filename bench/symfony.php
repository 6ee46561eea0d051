<?php
/*
 * symfony.php - Symfony Lock as its documentation uses it: a lock of its factory,
 * acquire(true), release(), all else by default (so a lease of 300 s, and where a
 * store can't wait, another try every 90 to 110 ms). Speaks with contest.lua as
 * client.c does.
 *
 *   symfony.php flock DIRECTORY | redis SOCKET | memcached HOST PORT | pgsql DSN USER | pdo DSN [USER PASSWORD]
 */
require 'Symfony/Component/Lock/autoload.php';

use Symfony\Component\Lock\LockFactory;
use Symfony\Component\Lock\Store\FlockStore;
use Symfony\Component\Lock\Store\MemcachedStore;
use Symfony\Component\Lock\Store\PdoStore;
use Symfony\Component\Lock\Store\PostgreSqlStore;
use Symfony\Component\Lock\Store\RedisStore;

const NAMES = 2000;
const HANDOVER = 'u/a/handover'; // as loop.lua has it

function store(array $arguments)
{
    switch ($arguments[1]) {
        case 'flock':
            return new FlockStore($arguments[2]);
        case 'redis':
            $redis = new Redis();
            $redis->connect($arguments[2]);
            return new RedisStore($redis);
        case 'memcached':
            $memcached = new Memcached();
            $memcached->addServer($arguments[2], (int) $arguments[3]);
            return new MemcachedStore($memcached);
        case 'pgsql':
            return new PostgreSqlStore($arguments[2], ['db_username' => $arguments[3]]);
        case 'pdo':
            return new PdoStore(new PDO($arguments[2], $arguments[3] ?? null, $arguments[4] ?? null));
    }
}

$factory = new LockFactory(store($argv));
$held = null;
$used = 0;

function cycle(LockFactory $factory, int $name)
{
    $lock = $factory->createLock('lock' . $name);
    $lock->acquire(true);
    $lock->release();
}

while (($line = fgets(STDIN)) !== false) {
    $line = trim($line);
    if ($line === 'take') {
        $began = hrtime(true);
        $held = $factory->createLock(HANDOVER);
        $held->acquire(true);
        echo $began, ' ', hrtime(true), "\n";
    } elseif ($line === 'give') {
        $began = hrtime(true);
        $held->release();
        echo $began, "\n";
    } else {
        $n = (int) $line;
        while ($used < NAMES) {
            cycle($factory, $used++);
        }
        $start = hrtime(true);
        for ($i = 0; $i < $n; $i++) {
            cycle($factory, mt_rand(0, NAMES - 1));
        }
        printf("%.2f\n", (hrtime(true) - $start) / 1e3 / $n);
    }
}
