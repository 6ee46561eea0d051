<?php
// A PHP program with Symfony Lock, for the specs: php symfony.php DSN [autoload.php]. Reads requests, a line
// each: a verb and arguments with spaces between, percent-encoded; answers each by a line that
// spec/support/init.lua reads, a table of Lua: true and what came of it, or false and what was raised.
//
//     acquire NAME write|read wait|try     whether it was acquired
//     release NAME        refresh NAME        held NAME
//     count FILE NAME N   N times: acquires NAME, waiting, and adds 1 to the number in FILE
//     version

namespace Hierlock\Spec;

use Symfony\Component\Lock\LockFactory;
use Symfony\Component\Lock\Store\StoreFactory;

set_error_handler(static function (int $type, string $message) {
    if (!(error_reporting() & $type) || $type & (E_DEPRECATED | E_USER_DEPRECATED)) {
        return false;
    }
    throw new \ErrorException($message);
});
error_reporting(E_ALL & ~E_DEPRECATED & ~E_USER_DEPRECATED);
require $argv[2] ?? '/usr/share/php/Symfony/Component/Lock/autoload.php';

$factory = new LockFactory(StoreFactory::createStore($argv[1]));
$locks = [];

function acquire(object $lock, string $mode, bool $wait): bool
{
    return $mode === 'read' ? $lock->acquireRead($wait) : $lock->acquire($wait);
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
                $locks[$name] ??= $factory->createLock($name, 300.0, false);
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
