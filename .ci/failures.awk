# awk -f failures.awk -v most=LINES LOG: what of a failed stage's output says why it failed, in so many lines at most.
#
# That are the failed files as spec/support/suite.sh reports them, violations, what a sanitizer, a compiler or a linter
# has to say, and, where nothing of that is found, the end.

function want(n) { if (left < n) left = n }
function keep(line) { if (n++ < most) text = text "    " substr(line, 1, 240) "\n" }

NF { last[++seen % 16] = $0 }
/^=== Failed beside others/ { passed_alone = 1 }         # it has passed by then, or is reported again
/^=== FAILED: / || /^The slowest:/ { passed_alone = left = 0 }
passed_alone { next }
/^=== FAILED: / { want(16) }
/VIOLATION|ERROR: [A-Za-z]*Sanitizer|WARNING: ThreadSanitizer|: runtime error: / { want(8) }
/^==[0-9]+== (Invalid|Mismatched|Conditional|Use of|Syscall|[0-9,]+ .*lost)/ { want(8) }
/ERROR SUMMARY: [1-9]|may not be pending|(^|[^a-z])[Ee]rror: |found .*crash|It ended (without a report|badly)/ { want(2) }
# Where it is; told only with what went wrong there.
/^\[ RUN / { where = $0; next }
!NF || /^\[( *OK |=+\]|-+\]|  (FAILED|ERROR|PASSED) )/ || /^make(\[[0-9]+\])?: / { next }
left > 0 {
  left--
  if (where != "") keep(where)
  where = ""
  keep($0)
}

END {
  for (i = seen < 15 ? 1 : seen - 14; !n && i <= seen; i++) tail = tail "    " substr(last[i % 16], 1, 240) "\n"
  printf "%s%s", text, tail
  if (n > most) printf "    ... and %d lines more: see the stage above\n", n - most
}
