# twin.sh: lay the CPU build's files over the engine, and leave a record of them.
set -eu
site=$(echo /opt/venv/lib/python3.*/site-packages)
tools=/opt/kimi-eagle3
cp -r /dev/shm/twin/files/. "$site/"
cp /dev/shm/twin/release.json /dev/shm/twin/twin.json "$tools/"
cp /dev/shm/twin/lock.txt "$tools/locks/twin.txt"
(cd /dev/shm/twin/files && find . -name '*.py' -printf "$site/%P\n") > /tmp/python
python3 -m compileall -q --invalidation-mode checked-hash -i /tmp/python

# The engine asks a process of its own what each class of models can do, some 10 s each, and keeps the answers by the hash
# of the class' file. Asked here, that's once for an image and not once for each start of a server.
HOME=/tmp NUMBA_CACHE_DIR=/tmp XDG_CACHE_HOME=/tmp TRITON_CACHE_DIR=/tmp TORCHINDUCTOR_CACHE_DIR=/tmp \
    FLASHINFER_WORKSPACE_BASE=/tmp VLLM_CACHE_ROOT=/cache/vllm VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 \
    python3 -B - KimiK25ForConditionalGeneration Eagle3DeepseekV2ForCausalLM LlamaForCausalLMEagle3 << 'PY'
import sys

from vllm.model_executor.models.registry import ModelRegistry

for name in sys.argv[1:]:
    ModelRegistry.models[name].inspect_model_cls()
PY
[ "$(find /cache/vllm/modelinfos -name '*.json' | wc -l)" -eq 3 ] || {
    echo "error: the engine keeps what it knows of models elsewhere than /cache/vllm/modelinfos: see twin.sh" >&2
    exit 1
}
# Any user may be given with `docker run --user`.
chmod 1777 /cache/vllm /cache/vllm/modelinfos
chmod 644 /cache/vllm/modelinfos/*
