# All results go to .out/, which git ignores. Required: Go, git, make, and for make test a C compiler and Node.js 18 with
# npm, which it installs with apt if they are missing and it runs as root. Everything else is built at the versions that
# the go.mod files pin.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # the Go tool fills the cores by itself, and linking the dev cluster twice at once exhausts the memory
MAKEFLAGS += --no-builtin-rules --no-print-directory

OUT := $(CURDIR)/.out
BIN := $(OUT)/bin
DIRS := $(wildcard .tools/images bus cmd deploy driversdk mcm proto)
# The modules of a release, each after those that it requires. A driver needs the first three, and none of the libraries
# of the others.
MODULES := proto bus driversdk driversdk/mcmdriver .

# One setting for build, vet and lint, so that they share compiled packages. Tests switch cgo on: -race needs it.
export CGO_ENABLED := 0
# The tools' caches stay in the clone.
export BUF_CACHE_DIR := $(OUT)/cache/buf
export GOLANGCI_LINT_CACHE := $(OUT)/cache/golangci-lint
# The directory where controller-runtime's envtest finds etcd, kube-apiserver and kubectl.
export KUBEBUILDER_ASSETS := $(OUT)/envtest
# Its API servers may have to start on a busy machine.
export KUBEBUILDER_CONTROLPLANE_START_TIMEOUT ?= 2m

FUZZTIME ?= 20000x

# For use after a command: || $(call remedy,text)
remedy = { printf '\n%s: %s\n' '$@' '$(1)' >&2; exit 1; }

ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
ifeq ($(shell command -v go),)
$(error Go is not installed or not in PATH: see https://go.dev/doc/install)
endif
endif

##@ Try it

.PHONY: demo
demo: demo-parts ## Start everything, create 10 Machines, kill a driver replica, clean up
	@exec $(BIN)/demo run

.PHONY: up
up: demo-parts ## Start the same set-up and leave it running
	@exec $(BIN)/demo up

.PHONY: down
down: $(BIN)/demo ## Stop what `make up` started
	@exec $(BIN)/demo down

# With DEMO_KUBECONFIG the demo uses that cluster instead of the dev cluster.
.PHONY: demo-parts
demo-parts: build $(if $(DEMO_KUBECONFIG),,devcluster)

##@ Build

.PHONY: build
build: ## Build every program into .out/bin, and the nats-server that tests run as a process
	@echo '==> building the programs (about 2 minutes the first time)'
	@mkdir -p $(BIN)
	@go build -o $(BIN)/ ./cmd/... github.com/nats-io/nats-server/v2

$(BIN)/demo:
	@$(MAKE) build

.PHONY: devcluster
devcluster: $(BIN)/devcluster $(KUBEBUILDER_ASSETS)/etcd ## Build the dev cluster (etcd and Kubernetes in one program)

KUBERNETES = $(shell awk '$$1 == "k8s.io/kubernetes" { print $$2 }' deploy/devcluster/go.mod)
VERSION_PACKAGE := k8s.io/component-base/version

# Clients parse the API server's version, and fail on the default "v0.0.0-master".
$(BIN)/devcluster: $(shell find deploy/devcluster -type f -not -name '*_test.go' -not -name '*.md' 2>/dev/null)
	@echo '==> building the dev cluster (about 5 minutes the first time)'
	@version='$(KUBERNETES)'; IFS=. read -r major minor _ <<<"$${version#v}"; \
	go build -C deploy/devcluster -trimpath -buildvcs=false -o $@ -ldflags "-s -w \
		-X $(VERSION_PACKAGE).gitVersion=$$version \
		-X $(VERSION_PACKAGE).gitMajor=$$major \
		-X $(VERSION_PACKAGE).gitMinor=$$minor" . \
		|| $(call remedy,if the compiler or linker was killed: it needs about 4 GB of free memory and 5 GB of disk)
	@touch $@

$(KUBEBUILDER_ASSETS)/etcd: $(BIN)/devcluster
	@$< assets --dir $(KUBEBUILDER_ASSETS) >/dev/null

# For others: make images PROGRAMS=./cmd/driver-mine PLATFORMS=linux/amd64,linux/arm64
PROGRAMS ?= ./cmd/mcm ./cmd/mcmctl ./cmd/mcm-autoscaler ./cmd/mcm-grpc-bridge ./cmd/driver-virtual
PLATFORMS ?= linux/$(shell go env GOARCH)

.PHONY: images
images: ## Build container images (OCI layouts) with their SBOMs into .out/images, without a daemon
	@echo '==> building images for $(PLATFORMS) (about 6 minutes the first time)'
	@go run -C .tools/images . --dir $(CURDIR) --out $(OUT)/images --platforms $(PLATFORMS) $(PROGRAMS)

.PHONY: generate
generate: generated ## Write the generated Go code and CRDs into the tree
	@.tools/generated.sh write $(GENERATED)

.PHONY: fmt
fmt: $(BIN)/golangci-lint ## Format the Go code
	@$(BIN)/golangci-lint fmt $(DIRS)

.PHONY: release
release: ## Tag a release of all modules: VERSION=v0.2.0; prints how to publish it
	@.tools/release.sh '$(VERSION)' $(MODULES)

.PHONY: clean
clean: ## Stop the demo set-up and remove all results
	@if [ -x $(BIN)/demo ]; then $(BIN)/demo down; fi
	@rm -rf $(OUT)

##@ Check

.PHONY: verify
verify: fmt-check vet lint arch prose proto-lint proto-breaking generate-check ## All checks that do not run the code
	@echo '==> verify: all good'

.PHONY: fmt-check
fmt-check: $(BIN)/golangci-lint
	@echo '==> format'
	@$(BIN)/golangci-lint fmt --diff $(DIRS) || $(call remedy,the code is not formatted; run: make fmt)

.PHONY: vet
vet: ## Run go vet on all modules
	@echo '==> vet (about 5 minutes the first time)'
	@for module in $(MODULES); do go vet -C $$module ./...; done
	@go vet -C deploy/devcluster -trimpath ./...
	@go vet -C .tools/images ./...

.PHONY: lint
lint: $(BIN)/golangci-lint ## Run golangci-lint on all modules
	@echo '==> lint (about 4 minutes the first time)'
	@$(BIN)/golangci-lint config verify
	@for module in $(MODULES); do (cd $$module && $(LINT) ./...) || $(call remedy,$(LINT_REMEDY)); done
	@cd deploy/devcluster && GOFLAGS="$${GOFLAGS:-} -trimpath" $(LINT) ./... || $(call remedy,$(LINT_REMEDY))
	@cd .tools/images && $(LINT) ./... || $(call remedy,$(LINT_REMEDY))

LINT = $(BIN)/golangci-lint run --config $(CURDIR)/.golangci.yml
LINT_REMEDY := mend the above; where a linter is wrong about a line write //nolint:<name> // <reason>

.PHONY: arch
arch: ## Check the import rules
	@echo '==> arch'
	@.tools/arch.sh $(MODULES)

.PHONY: prose
prose: ## Check the documents' words and the length of their sentences
	@echo '==> prose'
	@.tools/prose.sh || $(call remedy,mend the sentences above: one idea each; name who acts)

.PHONY: proto-lint
proto-lint: $(BIN)/buf ## Lint the driver contract
	@echo '==> proto lint'
	@$(BIN)/buf lint proto

PROTO_IMAGE := proto/image.binpb

.PHONY: proto-breaking
proto-breaking: $(BIN)/buf ## Check that the driver contract is compatible with the accepted one
	@echo '==> proto breaking changes'
	@[ -f $(PROTO_IMAGE) ] || $(call remedy,$(PROTO_IMAGE) is missing; run: make proto-image)
	@$(BIN)/buf breaking proto --against $(PROTO_IMAGE) \
		|| $(call remedy,the change breaks existing drivers; add fields instead of changing them and reserve removed ones)

.PHONY: proto-image
proto-image: $(BIN)/buf ## Accept the current driver contract as the one to stay compatible with
	@$(BIN)/buf build proto --exclude-source-info -o $(PROTO_IMAGE)
	@echo '==> wrote $(PROTO_IMAGE); commit it'

.PHONY: generate-check
generate-check: generated
	@echo '==> generated code'
	@.tools/generated.sh check $(GENERATED) || $(call remedy,generated files are not up to date; run: make generate)

##@ Test

.PHONY: test
test: test-unit test-fuzz test-images test-e2e ## Unit tests, some thousand inputs for each fuzz target, an image, end-to-end tests

.PHONY: test-unit
test-unit: c-compiler devcluster nodejs ## Unit tests with the race detector
	@echo '==> unit tests (about 4 minutes the first time)'
	@status=0; for module in $(MODULES); do \
		packages=$$(go list -C $$module ./... | grep -v '/cmd/dev/e2e\(/\|$$\)'); \
		CGO_ENABLED=1 go test -C $$module -race -shuffle=on -timeout=10m $$packages || status=1; \
	done; exit $$status
	@go test -C driversdk -run '^$$' -bench . -benchtime 1x . # no figure counts here: they must run

.PHONY: test-fuzz
test-fuzz: ## Run each fuzz target for FUZZTIME (20000x inputs)
	@echo '==> fuzz targets, $(FUZZTIME) inputs each'
	@.tools/fuzz.sh $(FUZZTIME) $(MODULES)

.PHONY: test-images
test-images: ## Build one image and inspect it
	@echo '==> an image (a minute and a half the first time)'
	@go test -C .tools/images -v -count=1 ./...

.PHONY: test-e2e
test-e2e: c-compiler build devcluster nodejs ## End-to-end tests: real processes against the dev cluster
	@echo '==> end-to-end tests'
	@CGO_ENABLED=1 go test -race -count=1 -p=1 -timeout=30m ./cmd/dev/e2e/...

.PHONY: mutants
mutants: ## Break the protocol code in one place at a time, and check that a test fails for each
	@echo '==> mutations of the protocol code'
	@go test -C bus ./mutants -count=1 -v -timeout=90m -mutants.run

# Parameters of make faults.
FENCING ?= on
# With FENCING=off the drivers are built without fencing: a replica continues even if it may have been replaced. Then the
# run must fail, and continues until it does. Only a replica frozen during a create, until the machine has come and gone,
# shows the damage.
UNFENCED := $(OUT)/unfenced
ifeq ($(FENCING),off)
SEED ?= 3
LIFECYCLES ?= 30
KINDS ?= freeze-create
BUS ?= cluster
LIMIT ?= 15m
FAULTSFLAGS := --until-damage
endif
SEED ?= 1
LIFECYCLES ?= 200
RUN_FAULTS = $(BIN)/faults --bin $(if $(filter off,$(FENCING)),$(UNFENCED),$(BIN)) --dir $(OUT)/run/faults \
	--seed $(SEED) --lifecycles $(LIFECYCLES) $(if $(KINDS),--kinds $(KINDS)) $(if $(BUS),--bus $(BUS)) \
	$(if $(LONGEST),--longest $(LONGEST)) $(if $(LIMIT),--limit $(LIMIT)) $(FAULTSFLAGS)

# Programs with a driver without fencing: a run must end with damage, which is exit status 1 of cmd/dev/faults; 2 is a run that
# proves nothing. make itself exits with 2 in both cases, and prints "Error 1" or "Error 2".
.PHONY: unfenced
unfenced: build devcluster
	@mkdir -p $(UNFENCED)
	@for program in devcluster mcm virtual-cloud nats-server; do ln -sf $(BIN)/$$program $(UNFENCED)/$$program; done
	@go build -tags unfenced -o $(UNFENCED)/ ./cmd/driver-virtual

.PHONY: faults
faults: build devcluster $(if $(filter off,$(FENCING)),unfenced) ## Break everything by SEED until LIFECYCLES machines have come and gone; FENCING=off SEED=3 LIFECYCLES=30 must fail
	@exec $(RUN_FAULTS)

# Succeeds only if make faults FENCING=off fails with 1. It calls make again, because FENCING=off is evaluated when the
# Makefile is read.
.PHONY: faults-unfenced
faults-unfenced: ## Check that make faults detects missing fencing: succeeds only if damage was found
	@$(MAKE) FENCING=off faults-damage

.PHONY: faults-damage
faults-damage: $(if $(filter off,$(FENCING)),unfenced)
	@$(if $(filter off,$(FENCING)),,$(call remedy,damage proves nothing while fencing is on; run: make faults-unfenced))
	@.tools/damage.sh $(RUN_FAULTS)

# Calls of each side for a figure of the bus.
BENCHTIME ?= 50000x

.PHONY: bench-bus
bench-bus: ## Reads and creates over the bus against bare NATS; BENCHTIME=200000x runs longer
	@echo '==> benchmarks of the bus (about a minute; the machine should have nothing else to do)'
	@go test -C driversdk -run '^$$' -bench . -benchtime $(BENCHTIME) .

.PHONY: bench
bench: $(if $(ONLY),,bench-bus) build devcluster ## Benchmarks against peers; ONLY=faults,create selects some, ROUNDS=9 runs longer, FLEET=10000 is for ONLY=fleet
	@echo '==> benchmarks (about 15 minutes; the machine should have nothing else to do)'
	@$(BIN)/bench --bin $(BIN) --dir $(OUT)/run/bench $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(FLEET),--fleet $(FLEET))

# go test -race links with the C compiler.
.PHONY: c-compiler
c-compiler:
	@if command -v "$$(go env CC)" >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo '==> installing gcc: the race detector needs a C compiler'; \
		apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends gcc libc6-dev; \
	fi; \
	command -v "$$(go env CC)" >/dev/null \
		|| $(call remedy,the race detector needs a C compiler; install gcc with the headers of the C library and run this again)

# The Node.js drivers of deploy/examples, with the packages of their lock files.
NODEJS := driver-nodejs driver-nodejs-full
.PHONY: nodejs
nodejs: node-runtime $(NODEJS:%=$(OUT)/nodejs/%/node_modules/.package-lock.json)
	@for driver in $(NODEJS); do cp deploy/examples/$$driver/*.mjs $(OUT)/nodejs/$$driver/; done

$(OUT)/nodejs/%/node_modules/.package-lock.json: deploy/examples/%/package-lock.json deploy/examples/%/package.json | node-runtime
	@echo '==> installing the packages of $* (a few seconds)'
	@mkdir -p $(OUT)/nodejs/$*
	@cp $^ $(OUT)/nodejs/$*/
	@npm ci --prefix $(OUT)/nodejs/$* --cache $(OUT)/cache/npm --ignore-scripts --no-audit --no-fund --loglevel=error \
		|| $(call remedy,npm could not install the packages of $<; it needs a registry: see `npm config get registry`)
	@touch $@

.PHONY: node-runtime
node-runtime:
	@if command -v node >/dev/null && command -v npm >/dev/null && node -e 'process.exit(+(parseInt(process.versions.node) < 18))'; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo '==> installing nodejs and npm: there are example drivers in Node.js (about a minute)'; \
		apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends nodejs npm; \
	fi; \
	{ command -v node && command -v npm && node -e 'process.exit(+(parseInt(process.versions.node) < 18))'; } >/dev/null \
		|| $(call remedy,the example drivers need Node.js 18 or later with npm; install both and run this again)

##@ Help

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Helpers of the targets above.

# generated creates all generated files outside the tree, so that a check does not change the tree.
GENERATED := $(OUT)/generated
.PHONY: generated
generated: $(BIN)/buf $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc $(BIN)/controller-gen
	@rm -rf $(GENERATED)
	@mkdir -p $(GENERATED)/proto
	@for dir in proto cmd/mcm-grpc-bridge; do \
		PATH="$(BIN):$$PATH" $(BIN)/buf generate $$dir --template proto/buf.gen.yaml -o $(GENERATED)/$$dir; \
	done
	@for api in $(wildcard mcm/api/v*); do \
		$(BIN)/controller-gen object "paths=./$$api" "output:object:dir=$(GENERATED)/$$api"; \
		$(BIN)/controller-gen crd "paths=./$$api" "output:crd:dir=$(GENERATED)/deploy/crds"; \
	done

# $(1): program, $(2): its import path, $(3): how long it takes on 2 cores with nothing cached
define tool
$(BIN)/$(1): .tools/go.mod .tools/go.sum
	@echo '==> building $(1) ($(3) the first time)'
	@go build -C .tools -trimpath -o $$@ $(2)
	@touch $$@
endef
$(eval $(call tool,buf,github.com/bufbuild/buf/cmd/buf,about 2 minutes))
$(eval $(call tool,protoc-gen-go,google.golang.org/protobuf/cmd/protoc-gen-go,half a minute))
$(eval $(call tool,protoc-gen-go-grpc,google.golang.org/grpc/cmd/protoc-gen-go-grpc,half a minute))
$(eval $(call tool,controller-gen,sigs.k8s.io/controller-tools/cmd/controller-gen,about a minute))
$(eval $(call tool,golangci-lint,github.com/golangci/golangci-lint/v2/cmd/golangci-lint,about 2 minutes))
