# tools.sh LOCK: the installer (uv) by hash, and an empty environment for the engine.
set -eu
[ ! -s /dev/shm/network ] || . /dev/shm/network
[ ! -s /dev/shm/ca ] || export PIP_CERT=/dev/shm/ca
export HOME=/tmp SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1
/usr/bin/python3 -m venv /tmp/pip
/tmp/pip/bin/pip install --quiet --no-cache-dir --no-compile --only-binary :all: --require-hashes \
    --target /opt/uv -r "$1"
cp "$1" /opt/kimi-eagle3/locks/tools.txt
/opt/uv/bin/uv venv --quiet --no-cache --no-config --python /usr/bin/python3 /opt/venv
rm -f /opt/venv/.lock
