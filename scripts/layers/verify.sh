# verify.sh: put the image's own tools in place, then hold the engine against the contract. The record stays in the image.
set -eu
export HOME=/tmp TMPDIR=/tmp
tools=/opt/kimi-eagle3
cp /dev/shm/release.json /dev/shm/base.json "$tools/"
cp -r /dev/shm/in_image "$tools/in_image"
chmod -R u=rwX,go=rX "$tools"
python3 "$tools/in_image/contract.py" --json --progress > "$tools/contract.json" || {
    cat "$tools/contract.json"
    exit 1
}
find "$tools" -name __pycache__ -prune -exec rm -r {} +
