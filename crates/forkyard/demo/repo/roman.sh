#!/bin/sh
# Prints a number from 1 to 3999 in Roman numerals.
n=$1
out=
for pair in 1000:M 500:D 100:C 50:L 10:X 5:V 1:I; do
  value=${pair%%:*}
  letter=${pair##*:}
  while [ "$n" -ge "$value" ]; do
    out=$out$letter
    n=$((n - value))
  done
done
echo "$out"
