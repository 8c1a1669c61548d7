#!/bin/sh
# Exit status 0: everything is as it should be.
failed=0
check() {
  got=$(sh roman.sh "$1")
  if [ "$got" = "$2" ]; then
    echo "ok   $1 = $2"
  else
    echo "FAIL $1: expected $2, got $got"
    failed=1
  fi
}
check 1 I
check 3 III
check 4 IV
check 9 IX
check 14 XIV
check 40 XL
check 1994 MCMXCIV
check 3888 MMMDCCCLXXXVIII
exit $failed
