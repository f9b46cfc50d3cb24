package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// largest is what an image may hold, compressed: a static program and nothing else.
const largest = 30 << 20

// TestImage builds the program that is built fastest, and looks at what would be
// pushed.
func TestImage(t *testing.T) {
	out := t.TempDir()
	args := []string{"--dir", "../..", "--out", out, "--platforms", "linux/" + runtime.GOARCH, "./cmd/driver-virtual"}
	if err := run(t.Context(), args); err != nil {
		t.Fatal(err)
	}
	index, err := layout.ImageIndexFromPath(filepath.Join(out, "driver-virtual"))
	if err != nil {
		t.Fatal(err)
	}
	manifests, err := index.IndexManifest()
	if err != nil || len(manifests.Manifests) != 1 {
		t.Fatalf("the layout has %d images (%v), want 1", len(manifests.Manifests), err)
	}
	image, err := index.Image(manifests.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	const entrypoint = "/ko-app/driver-virtual"
	if c := config.Config; c.User != user || !slices.Equal(c.Entrypoint, []string{entrypoint}) || len(c.Cmd) > 0 {
		t.Errorf("it runs %q %q as %q, want %s as %s", c.Entrypoint, c.Cmd, c.User, entrypoint, user)
	}
	if config.OS != "linux" || config.Architecture != runtime.GOARCH {
		t.Errorf("it is for %s/%s", config.OS, config.Architecture)
	}
	if title := config.Config.Labels["org.opencontainers.image.title"]; title != "driver-virtual" {
		t.Errorf("its title is %q", title)
	}
	checkFiles(t, image, entrypoint)
	checkSBOM(t, out)
}

// checkFiles wants a static program in the image, and no other file.
func checkFiles(t *testing.T, image v1.Image, entrypoint string) {
	t.Helper()
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	files, total := map[string][]byte{}, int64(0)
	for _, layer := range layers {
		size, err := layer.Size()
		if err != nil {
			t.Fatal(err)
		}
		total += size
		readFiles(t, layer, files)
	}
	if total > largest {
		t.Errorf("the image has %d bytes, want %d at most", total, largest)
	}
	if len(files) != 1 || files[entrypoint] == nil {
		t.Fatalf("it holds %d files, want %s alone", len(files), entrypoint)
	}
	program, err := elf.NewFile(bytes.NewReader(files[entrypoint]))
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(program.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Errorf("%s needs a dynamic linker, and the image has none", entrypoint)
	}
}

// readFiles adds the files of a layer, which anybody must be able to run.
func readFiles(t *testing.T, layer v1.Layer, files map[string][]byte) {
	t.Helper()
	content, err := layer.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	for r := tar.NewReader(content); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Typeflag == tar.TypeDir {
			continue
		}
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
		if header.FileInfo().Mode().Perm()&0o005 != 0o005 {
			t.Errorf("%s has mode %s: user %s cannot run it", header.Name, header.FileInfo().Mode(), user)
		}
	}
}

// checkSBOM wants a list of what is linked into the program.
func checkSBOM(t *testing.T, out string) {
	t.Helper()
	lists, err := filepath.Glob(filepath.Join(out, "driver-virtual.sbom", "*.spdx.json"))
	if err != nil || len(lists) != 1 {
		t.Fatalf("there are lists of what is linked: %q (%v), want 1", lists, err)
	}
	text, err := os.ReadFile(lists[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"spdxVersion": "SPDX-`, "github.com/machinebus/machinebus", "github.com/nats-io/nats.go"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s does not mention %s", filepath.Base(lists[0]), want)
		}
	}
}
