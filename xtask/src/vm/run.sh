#!/bin/sh
# The first process on the disk: makes the machine look like one that systemd runs, then runs the suites as root, as an ordinary
# user, and as one whose cgroups are delegated, all or in part. Speaks to its maker by lines that start with "vm: ".
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 RUST_BACKTRACE=0
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
exec </dev/null >/dev/console 2>&1
mkdir -p /dev/pts /dev/shm
mount -t devpts -o ptmxmode=0666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t securityfs security /sys/kernel/security
mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup /sys/fs/cgroup
busybox modprobe loop
busybox ip link set lo up
busybox hostname machine
chmod 1777 /tmp /var/tmp
mkdir -p /home/user
chown 1000:1000 /home/user
chmod 700 /home/user /root

# The word after forkyard.NAME= of the command line.
setting() { sed -n "s/.*forkyard\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
seconds() { cut -d' ' -f1 /proc/uptime; }

# As systemd does it: sessions belong to root, and user@1000.service with all below it to the user.
cgroups=/sys/fs/cgroup
controllers() { echo "+cpu +memory +pids" >"$1/cgroup.subtree_control"; }
delegate() {
	mkdir -p "$1"
	chown 1000:1000 "$1" "$1/cgroup.procs" "$1/cgroup.threads" "$1/cgroup.subtree_control"
}
users=$cgroups/user.slice
controllers $cgroups
for id in 0 1000; do
	mkdir -p $users/user-$id.slice
	controllers $users
	controllers $users/user-$id.slice
	mkdir $users/user-$id.slice/session-1.scope
done
service=$users/user-1000.slice/user@1000.service
delegate $service
controllers $service
delegate $service/app.slice
controllers $service/app.slice
delegate $service/app.slice/forkyard.scope
# A manager that was not given the processor.
mkdir $cgroups/partly.slice
echo "+memory +pids" >$cgroups/partly.slice/cgroup.subtree_control
delegate $cgroups/partly.slice/partly.service
delegate $cgroups/partly.slice/partly.service/forkyard.scope

# as MODE COMMAND...
as() {
	mode=$1
	shift
	case $mode in
	root) group=$users/user-0.slice/session-1.scope home=/home/root who= ;; # others can pass through it
	user) group=$users/user-1000.slice/session-1.scope home=/home/user who=user ;;
	delegated) group=$service/app.slice/forkyard.scope home=/home/user who=user ;;
	partly) group=$cgroups/partly.slice/partly.service/forkyard.scope home=/home/user who=user ;;
	esac
	(
		sh -c 'echo $PPID' >"$group/cgroup.procs"
		export HOME=$home TMPDIR=$home/tmp FORKYARD_MACHINE=$mode FORKYARD_MACHINE_SCALE=$scale FORKYARD_TEST_REQUIRE=1
		mkdir -p $home/tmp
		[ -z "$who" ] || chown 1000:1000 $home/tmp
		cd $home
		exec timeout -k 5 "$limit" ${who:+setpriv --reuid=1000 --regid=1000 --clear-groups --} "$@"
	)
}

limit=$(setting limit) scale=$(setting scale)
failed=0 passed=0
echo "vm: up $(uname -r), $(nproc) cores, landlock $(grep -c landlock /sys/kernel/security/lsm), $(seconds) s"
for mode in $(setting modes | tr , ' '); do
	only=$(setting only.$mode)
	for program in /suite/*_tests; do
		ignored=$($program --list --ignored --format terse | sed -n 's/: test$//p')
		for test in $($program --list --format terse | sed -n 's/: test$//p' | grep -E "$only" | grep -v _as_an_ordinary_user); do
			# Those that need another process or another machine; what needs this one is in machine::.
			case $test in machine::*creation_on*) continue ;; machine::* | *::machine::*) ;; *) echo "$ignored" | grep -qxF "$test" && continue ;; esac
			busybox dmesg -c >/dev/null
			before=$(seconds)
			as $mode $program --exact "$test" --include-ignored --nocapture >/tmp/output 2>&1
			code=$?
			took=$(echo "$before $(seconds)" | awk '{ printf "%.1f", $2 - $1 }')
			if [ $code = 0 ]; then
				passed=$((passed + 1))
				echo "vm: ok $mode $test $took s"
				grep -E '^ *[0-9]+ ms ' /tmp/output | sort -rn
				grep '^left out' /tmp/output
			else
				failed=$((failed + 1))
				echo "vm: FAILED $mode $test $took s, exit status $code"
				tail -n 60 /tmp/output
				busybox dmesg | tail -n 10
			fi
		done
	done
done
echo "vm: end $passed passed, $failed failed, $(seconds) s"
busybox poweroff -f
