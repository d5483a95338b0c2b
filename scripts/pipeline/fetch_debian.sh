# fetch_debian.sh LOCK OUT: every Debian package of the lock, as a mirror that any web server can serve: Debian's own
# signed lists, and of its pool what the lock names. Runs in the base image, not in a build. What is there stays.
set -eu
export DEBIAN_FRONTEND=noninteractive
. /dev/shm/layers/apt.sh
out=$2
mkdir -p "$out/new/partial" "$out/pool" "$out/dists"
# The lists as text, under their own names. The folder is open to whoever owns it, and perhaps not to apt's own user.
echo 'Acquire::GzipIndexes "false"; APT::Sandbox::User "root";' >> /tmp/apt.conf
apt-get update -qq -o APT::Update::Error-Mode=any
# shellcheck disable=SC2046
(cd "$out/new" && apt-get download -qq --print-uris $(grep -v '^#' "$1")) > /tmp/uris || {
    echo "error: a Debian package of locks/debian.txt is no longer served by the mirror: run 'nox -s lock -- debian'," \
        "or set DEBIAN_MIRROR to an archive of the date that pins.toml names" >&2
    exit 1
}
# A line is: 'URI' FILE SIZE SHA256:HASH. FILE is NAME_VERSION_ARCHITECTURE.deb, and has an epoch that the URI lacks.
# The packages that came and are whole go to their place in the pool; the versions of the others are printed.
settle() {
    while read -r uri file _ hash; do
        target=$(echo "${uri#*/pool/}" | sed "s/'$//; s/%2b/+/g; s/%3a/:/g; s/%7e/~/g")
        target="$out/pool/$target"
        [ ! -f "$target" ] || continue
        if [ -f "$out/new/$file" ] && echo "${hash#SHA256:}  $out/new/$file" | sha256sum --check --status -; then
            mkdir -p "${target%/*}"
            mv "$out/new/$file" "$target"
        else
            grep "^${file%%_*}=" "$1"
        fi
    done < /tmp/uris
}
missing=$(settle "$1")
[ -z "$missing" ] || (
    cd "$out/new"
    # shellcheck disable=SC2086
    apt-get download -q $missing
)
missing=$(settle "$1")
[ -z "$missing" ] || {
    echo "error: the mirror gave other bytes than its lists say for" $missing >&2
    exit 1
}
# HOST_PATH_dists_SUITE_main_binary-amd64_Packages is dists/SUITE/main/binary-amd64/Packages. Last: they name the pool.
rm -rf "$out/new" "$out/dists.new"
for list in /var/lib/apt/lists/*_dists_*; do
    path=$(echo "${list##*_dists_}" | tr _ /)
    mkdir -p "$out/dists.new/$(dirname "$path")"
    cp "$list" "$out/dists.new/$path"
done
rm -rf "$out/dists"
mv "$out/dists.new" "$out/dists"
echo "$(wc -l < /tmp/uris) packages are there"
# Whoever owns the folder owns what is in it.
chown -R --reference="$out/.." "$out"
