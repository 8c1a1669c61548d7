#!/bin/sh
# The first process of the machine, in the archive that the kernel unpacked: makes the disk the root and goes on there.
bb=/bin/busybox
$bb mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
for module in virtio_pci virtio_blk crc32c_generic quota_v2 ext4; do
	$bb modprobe $module
done
$bb mount -t ext4 -o noatime,prjquota /dev/vda /new && $bb cp -a /tree/. /new/ || {
	echo "vm: the disk can't be used"
	$bb poweroff -f
}
$bb umount /sys /proc
exec $bb switch_root /new /suite/run
