-- The lease is not there, and will not be, even if the take that was to make it is read after this.
recall(ARGV[2], ARGV[3])
return { 1 }
