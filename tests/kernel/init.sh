#!/bin/busybox sh
# The initramfs' init: the host's / (read-only) under a tmpfs becomes the guest's /, and guest.sh goes on from there.
fail() { echo "init: $1" >/dev/console; /bin/busybox poweroff -f; }
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev /lower /over /new
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in $(cat /modules/order); do insmod "/modules/$module" || fail "cannot load $module"; done
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "$options,ro,cache=loose" host /lower || fail "cannot mount the host's /"
mount -t tmpfs -o mode=755,size=75% over /over
mkdir /over/upper /over/work
mount -t overlay -o lowerdir=/lower,upperdir=/over/upper,workdir=/over/work over /new || fail "cannot mount the overlay"
mkdir -p /new/testbed-results
mount -t 9p -o "$options" results /new/testbed-results || fail "cannot mount the results folder"
umount /proc /sys /dev
exec switch_root /new /bin/sh /testbed-results/guest.sh
fail "cannot start guest.sh"
