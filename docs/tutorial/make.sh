#!/bin/sh
# Makes the tutorial's repository, a shell script with a fault and its tests, in the folder that is named.
set -eu
dir=${1:?usage: sh make.sh FOLDER}
mkdir -p "$dir/tests"
cd "$dir"
cat > price.sh <<'FILE'
#!/bin/sh
# Prints a price in cents as dollars: 1999 -> $19.99
printf '$%d.%d\n' $(($1 / 100)) $(($1 % 100))
FILE
cat > tests/run.sh <<'FILE'
#!/bin/sh
# Every line: cents, then what is to be printed.
failed=0
while read -r cents want; do
  got=$(sh price.sh "$cents")
  [ "$got" = "$want" ] || { echo "FAIL $cents: $got, not $want"; failed=1; }
done <<'CASES'
1999 $19.99
1905 $19.05
5 $0.05
CASES
[ $failed = 0 ] && echo PASS
exit $failed
FILE
git init -q -b main .
git add -A
git -c user.name=me -c user.email=me@example.com commit -q -m "Prices"
