# Pid 1 of the guest, on the host's files: prepares what tests need, runs the command, leaves its exit code, powers off.
# Variables come from the file "environment" beside this script, which the host wrote.
. /testbed-results/environment
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm /lib/modules /testbed-tmp
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 tmp /testbed-tmp # not on /tmp: the checkout may be there
mount --bind "$MODULES" /lib/modules
# the kernel calls this path to load what a program asks for; the host may have no kmod of its own
[ -x /sbin/modprobe ] || ln -sf "$KMOD" /sbin/modprobe
stty -F /dev/ttyS1 -opost -echo 115200
exec </dev/null >/dev/ttyS1 2>&1
export TMPDIR=/testbed-tmp HOME=/testbed-tmp TERM=dumb LANG=C.UTF-8 TESTBED_REQUIRE_LIVE=1
cd "$CHECKOUT" || echo "cannot enter $CHECKOUT"
echo "kernel $(uname -r), $(nproc) processors, as user $GUEST_UID, ready $(cut -d' ' -f1 /proc/uptime) s after its start"
code=0
setpriv --reuid "$GUEST_UID" --regid "$GUEST_GID" --clear-groups /bin/sh /testbed-results/command || code=$?
echo "$code" >/testbed-results/code
"$BUSYBOX" poweroff -f
