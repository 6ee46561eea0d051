<?php
// A PHP program with Symfony Lock, for the specs: php symfony.php DSN [autoload.php]. Reads requests, a line
// each: a verb and arguments with spaces between, percent-encoded; answers each by a line that
// spec/support/init.lua reads, a table of Lua: true and what came of it, or false and what was raised.
//
//     acquire NAME write|read wait|try [TTL]     whether it was acquired; TTL in seconds, 300
//     release NAME        refresh NAME        held NAME
//     count FILE NAME N   N times: acquires NAME, waiting, and adds 1 to the number in FILE
//     history FILE KEY SECONDS TTL NAME…   for so long, at random, writes down when it held what, as symfony_history_spec
//                         says; ends when the connection does
//     version

namespace Hierlock\Spec;

use Symfony\Component\Lock\Exception\ExceptionInterface;
use Symfony\Component\Lock\LockFactory;
use Symfony\Component\Lock\Store\RedisStore;
use Symfony\Component\Lock\Store\StoreFactory;

set_error_handler(static function (int $type, string $message) {
    if (!(error_reporting() & $type) || $type & (E_DEPRECATED | E_USER_DEPRECATED)) {
        return false;
    }
    throw new \ErrorException($message);
});
error_reporting(E_ALL & ~E_DEPRECATED & ~E_USER_DEPRECATED);
require $argv[2] ?? '/usr/share/php/Symfony/Component/Lock/autoload.php';

$connection = $argv[1];
if (preg_match('~^redis://:([^@]*)@([^:/]+):(\d+)/(\d+)$~', $connection, $match)) {
    // As Symfony's Cache does it, which another package has.
    $connection = new \Redis();
    $connection->connect($match[2], (int) $match[3]);
    $connection->auth($match[1]);
    $connection->select((int) $match[4]);
}
$factory = new LockFactory(StoreFactory::createStore($connection));
$locks = [];

function acquire(object $lock, string $mode, bool $wait): bool
{
    return $mode === 'read' ? $lock->acquireRead($wait) : $lock->acquire($wait);
}

// Locks that end after TTL, if nobody refreshes them, also where this process is killed between the two steps of acquire().
function history(object $connection, string $file, string $key, float $seconds, float $ttl, array $names): int
{
    $factory = new LockFactory(new RedisStore($connection, $ttl));
    $out = fopen($file, 'ab');
    stream_set_write_buffer($out, 0);
    $say = static fn (string ...$words) => fwrite($out, implode(' ', $words)."\n");
    $granted = 0;
    $end = microtime(true) + $seconds;
    // Whether it was acquired; what it is called from then on.
    $take = static function (object $lock, string $name, string $mode, bool $wait) use ($say, $key, &$granted): ?string {
        if (!acquire($lock, $mode, $wait)) {
            return null;
        }
        $now = hrtime(true);
        $id = $key.'-'.++$granted;
        $say('g', $id, $name, 'write' === $mode ? 'x' : 's', (string) $now, (string) ($now + (int) ($lock->getRemainingLifetime() * 1e9)));

        return $id;
    };
    while (microtime(true) < $end) {
        $name = $names[array_rand($names)];
        $mode = random_int(0, 2) ? 'write' : 'read';
        $lock = $factory->createLock($name, $ttl, false);
        try {
            $id = $take($lock, $name, $mode, !random_int(0, 9));
            if (null === $id) {
                usleep(random_int(0, 5000));
                continue;
            }
            $what = random_int(0, 19);
            if ($what < 5) {
                $late = $what < 3;                  // or nearly
                for ($i = $late ? 3 : 0; $i < 4; ++$i) {
                    usleep((int) ($ttl * ($late ? random_int(800000, 1300000) : 400000)));
                    $lock->refresh();
                    $now = hrtime(true);
                    $say('u', $id, (string) ($now + (int) ($lock->getRemainingLifetime() * 1e9)));
                }
            } elseif ($what < 7) {                  // promoted, or demoted
                $say('e', $id, (string) hrtime(true));
                $id = $take($lock, $name, 'write' === $mode ? 'read' : 'write', false);
                usleep(random_int(0, 10000));
            } else {
                usleep(random_int(0, 6000));
            }
            if (7 === $what) {
                continue;                           // nobody gives it back
            }
            if (null !== $id) {
                $say('e', $id, (string) hrtime(true));
            }
            $lock->release();
        } catch (ExceptionInterface $e) {           // it has ended, or the connection has
            $connection->ping();
        }
    }

    return $granted;
}

function lua(mixed $value): string
{
    return is_bool($value) ? ($value ? 'true' : 'false') : (is_int($value) ? (string) $value : json_encode((string) $value, JSON_UNESCAPED_SLASHES | JSON_UNESCAPED_UNICODE));
}

while (false !== $line = fgets(STDIN)) {
    $words = array_map('rawurldecode', explode(' ', rtrim($line, "\n")));
    [$verb, $name] = [$words[0], $words[1] ?? ''];
    try {
        switch ($verb) {
            case 'acquire':
                $locks[$name] ??= $factory->createLock($name, (float) ($words[4] ?? 300), false);
                $result = acquire($locks[$name], $words[2], $words[3] === 'wait');
                break;
            case 'release':
                $locks[$name]->release();
                unset($locks[$name]);
                $result = true;
                break;
            case 'refresh':
                $locks[$name]->refresh();
                $result = true;
                break;
            case 'held':
                $result = $locks[$name]->isAcquired();
                break;
            case 'count':
                $lock = $factory->createLock($words[2], 300.0, false);
                for ($i = 0; $i < (int) $words[3]; ++$i) {
                    $lock->acquire(true);
                    $number = (int) file_get_contents($name);
                    usleep(random_int(0, 300));
                    file_put_contents($name, (string) ($number + 1));
                    $lock->release();
                }
                $result = true;
                break;
            case 'history':
                $result = history($connection, $name, $words[2], (float) $words[3], (float) $words[4], array_slice($words, 5));
                break;
            case 'version':
                $result = PHP_VERSION;
                break;
            default:
                throw new \LogicException("no verb '$verb'");
        }
        echo '{n=2,[1]=true,[2]=', lua($result), "}\n";
    } catch (\Throwable $e) {
        echo '{n=2,[1]=false,[2]=', lua(str_replace(["\n", '\\'], [' ', '/'], get_class($e).': '.$e->getMessage())), "}\n";
    }
}
