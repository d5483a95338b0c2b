# debian.sh LOCK: every Debian package of the lock at its version, and the user that the image runs as.
set -eu
. /dev/shm/layers/apt.sh
export DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH

apt-get update -qq -o APT::Update::Error-Mode=any
# shellcheck disable=SC2046
apt-get install -qq -y --no-install-recommends --allow-downgrades $(grep -v '^#' "$1") || {
    echo "error: a Debian package of locks/debian.txt is no longer served by the mirror: run 'nox -s lock -- debian'," \
        "or set DEBIAN_MIRROR to an archive of the date that pins.toml names" >&2
    exit 1
}
dpkg-query -W -f '${Package}=${Version}\n' | sort > /tmp/installed
grep -v '^#' "$1" | sort | diff - /tmp/installed || {
    echo "error: what is installed is not what locks/debian.txt lists (above): run 'nox -s lock -- debian'" >&2
    exit 1
}

useradd --uid 1000 --user-group --create-home --shell /bin/bash kimi
mkdir -p /cache /opt/kimi-eagle3/locks
# Any user may be given with `docker run --user`.
chmod 1777 /cache
cp "$1" /opt/kimi-eagle3/locks/debian.txt
# Logs, caches and backups hold times. What the base may have is emptied: the mark of a deletion in a layer has a time.
find /var/lib/apt/lists /var/cache/apt -type f ! -name lock -delete
find /var/log /var/cache/debconf /var/cache/ldconfig -type f -exec truncate --size=0 {} +
find /var/lib/dpkg /etc -maxdepth 1 \( -name '*-old' -o -name '*-' \) -type f -exec truncate --size=0 {} +
