# seal.sh: the last act of a step. Whatever it wrote gets the time SOURCE_DATE_EPOCH, so that the layer's bytes
# don't depend on when it was built. The excluded files are mounted by the builder.
set -eu
[ "$(date +%s)" -gt "$SOURCE_DATE_EPOCH" ] || {
    echo "error: the clock says $(date -u), before the images' own time (pins.toml, source_date_epoch): set the clock" >&2
    exit 1
}
rm -rf /root/.cache /var/tmp/* 2> /dev/null || true
find / -xdev -newermt "@$SOURCE_DATE_EPOCH" ! -path /etc/resolv.conf ! -path /etc/hosts ! -path /etc/hostname \
    ! -path /proc ! -path /sys ! -path /dev ! -path /tmp -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
