--- MariaDB: to the specs it is a MySQL that says another version.

return require "spec.support.stores.mysql"
