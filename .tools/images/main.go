// Images builds container images of the module's programs without a container daemon or registry: for each an OCI image
// layout and its SBOM (SPDX). It uses ko as a library, with an empty base image.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/ko/pkg/build"
)

// user is an unprivileged user id.
const user = "65532:65532"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) //nolint:forbidigo // the first context
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1) //nolint:forbidigo // this is main
	}
}

func run(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("images", flag.ContinueOnError)
	fs.Usage = func() {
		fmt.Fprintln(fs.Output(), "images [flags] ./cmd/program...")
		fs.PrintDefaults()
	}
	dir := fs.String("dir", ".", "`folder` of the module")
	out := fs.String("out", "images", "`folder` for the results; results of the same programs are replaced")
	platforms := fs.String("platforms", "linux/amd64", "`platforms` to build for, separated by commas")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}

		return err
	}
	if fs.NArg() == 0 {
		return errors.New("no program given: want some, such as ./cmd/mcm")
	}
	base, err := emptyBase(strings.Split(*platforms, ","))
	if err != nil {
		return err
	}
	for _, program := range fs.Args() {
		if err := buildImage(ctx, *dir, *out, program, *platforms, base); err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
	}

	return nil
}

// emptyBase returns an empty base image, like FROM scratch: the programs are static.
func emptyBase(platforms []string) (v1.ImageIndex, error) {
	base := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, text := range platforms {
		platform, err := v1.ParsePlatform(text)
		if err != nil {
			return nil, fmt.Errorf("platform %q: %w", text, err)
		}
		if platform.OS == "" || platform.Architecture == "" {
			return nil, fmt.Errorf("platform %q: want something like linux/amd64", text)
		}
		image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
		image, err = mutate.ConfigFile(image, &v1.ConfigFile{
			OS: platform.OS, Architecture: platform.Architecture, Variant: platform.Variant,
			RootFS: v1.RootFS{Type: "layers"},
		})
		if err != nil {
			return nil, fmt.Errorf("empty image: %w", err)
		}
		base = mutate.AppendManifests(base, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platform}})
	}

	return base, nil
}

func buildImage(ctx context.Context, dir, out, program, platforms string, base v1.ImageIndex) error {
	title := path.Base(program)
	folder, sbom := filepath.Join(out, title), filepath.Join(out, title+".sbom")
	if err := errors.Join(os.RemoveAll(folder), os.RemoveAll(sbom)); err != nil {
		return err
	}
	builder, err := build.NewGo(ctx, dir,
		build.WithBaseImages(baseOf(base)),
		build.WithPlatforms(strings.Split(platforms, ",")...),
		build.WithTrimpath(true),
		build.WithDefaultLdflags([]string{"-s", "-w"}),
		build.WithUser(user),
		build.WithSPDX(koVersion()),
		build.WithSBOMDir(sbom),
		build.WithJobs(1), // the Go tool fills the cores by itself
		build.WithLabel("org.opencontainers.image.title", title),
		build.WithLabel("org.opencontainers.image.licenses", "Apache-2.0"),
	)
	if err != nil {
		return fmt.Errorf("set up ko: %w", err)
	}
	importPath, err := builder.QualifyImport(program)
	if err != nil {
		return fmt.Errorf("no such program: %w", err)
	}
	result, err := builder.Build(ctx, importPath)
	if err != nil {
		return fmt.Errorf("build: %w", err)
	}
	if err := write(folder, result); err != nil {
		return fmt.Errorf("write %s: %w", folder, err)
	}
	digest, err := result.Digest()
	if err != nil {
		return fmt.Errorf("digest: %w", err)
	}
	fmt.Fprintf(os.Stdout, "%s@%s\n", folder, digest)

	return nil
}

// write writes an OCI image layout. ko's own writer parses the folder as a repository's name, and fails on capitals.
func write(folder string, result build.Result) error {
	to, err := layout.Write(folder, empty.Index)
	if err != nil {
		return err
	}
	switch result := result.(type) {
	case v1.ImageIndex:
		return to.AppendIndex(result)
	case v1.Image:
		return to.AppendImage(result)
	default:
		return fmt.Errorf("ko returned a %T, which is not an image", result)
	}
}

// koVersion returns ko's version in go.mod, which the SBOM names as its tool.
func koVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, dep := range info.Deps {
		if dep.Path == "github.com/google/ko" {
			return dep.Version
		}
	}

	return "unknown"
}

// baseOf returns the same base for every program. Its name is never resolved.
func baseOf(base v1.ImageIndex) build.GetBase {
	return func(context.Context, string) (name.Reference, build.Result, error) {
		ref, err := name.ParseReference("scratch.invalid/empty:latest")

		return ref, base, err
	}
}
