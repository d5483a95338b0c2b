# apt.sh, sourced: how this machine reaches Debian's packages. Sets APT_CONFIG; the lists are not fetched yet.
[ ! -s /dev/shm/network ] || . /dev/shm/network
# Descriptions in other words are no part of what is installed.
echo 'Acquire::Languages "none";' > /tmp/apt.conf
[ ! -s /dev/shm/ca ] || echo 'Acquire::https::CAInfo "/dev/shm/ca";' >> /tmp/apt.conf
if [ -n "${DEBIAN_MIRROR:-}" ]; then
    . /etc/os-release
    printf 'deb %s\n' "$DEBIAN_MIRROR $VERSION_CODENAME main" "$DEBIAN_MIRROR $VERSION_CODENAME-updates main" \
        "$DEBIAN_SECURITY_MIRROR $VERSION_CODENAME-security main" > /tmp/sources.list
    # An archive's lists are past their time by design; the lock says which versions are wanted.
    echo 'Dir::Etc::SourceList "/tmp/sources.list"; Dir::Etc::SourceParts "-"; Acquire::Check-Valid-Until "false";' \
        >> /tmp/apt.conf
fi
export APT_CONFIG=/tmp/apt.conf
