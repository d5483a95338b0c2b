# wheels.sh LOCK NAME: every wheel of a lock, by hash, into /opt/venv; the lock is kept as NAME.txt.
set -eu
[ ! -s /dev/shm/network ] || . /dev/shm/network
[ ! -s /dev/shm/ca ] || export SSL_CERT_FILE=/dev/shm/ca
# The cache sits beside the environment, so that wheels are unpacked once and linked, not copied.
# Bytecode is checked against its source by hash, not by time: a patched file is never ignored.
export HOME=/tmp UV_CACHE_DIR=/opt/uv-cache UV_LINK_MODE=hardlink UV_NO_CONFIG=1 UV_NO_INSTALLER_METADATA=1 \
    PYC_INVALIDATION_MODE=CHECKED_HASH SOURCE_DATE_EPOCH
/opt/uv/bin/uv pip install --python /opt/venv --no-deps --require-hashes --only-binary :all: --compile-bytecode -r "$1"
rm -rf /opt/uv-cache /opt/venv/.lock
cp "$1" "/opt/kimi-eagle3/locks/$2.txt"

site=$(echo /opt/venv/lib/python3.*/site-packages)
# nvcc from its wheel, laid out as compilers and FlashInfer expect a toolkit.
if [ -x "$site/nvidia/cu13/bin/nvcc" ] && [ ! -e /usr/local/cuda ]; then
    ln -s lib "$site/nvidia/cu13/lib64"
    ln -s libcudart.so.13 "$site/nvidia/cu13/lib/libcudart.so"
    # FlashInfer links with -lcuda. The driver's library comes with the GPU; here a stub without content stands for it.
    mkdir "$site/nvidia/cu13/lib/stubs"
    gcc -shared -nostdlib -x c /dev/null -Wl,-soname,libcuda.so.1 -o "$site/nvidia/cu13/lib/stubs/libcuda.so"
    ln -s "$site/nvidia/cu13" /usr/local/cuda
fi
if [ "$2" = engine ]; then
    /opt/uv/bin/uv pip check --no-cache --python /opt/venv > /tmp/check 2>&1 || true
    grep '^Checked' /tmp/check
    wrong=$(grep '^The package' /tmp/check || true)
    [ -z "$wrong" ] || {
        echo "error: the wheels of locks/ don't fit each other: run 'nox -s lock': $wrong" >&2
        exit 1
    }
fi
