// Package newdriver writes the Go module of a new driver: one that builds, that passes the contract against a fake of its
// cloud, and that has what it takes to run it. The author replaces the cloud.
//
// The files are those of template, without their ending .tmpl. The package knows nothing of the bus, and runs no program.
package newdriver

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"
)

// The files have an ending of their own, as they are no Go code of this module.
//
//go:embed all:template
var files embed.FS

const (
	root   = "template"
	ending = ".tmpl"
)

// A Driver is one to write.
type Driver struct {
	// Name is the provider's: a lower-case DNS label that begins with a letter, as it is part of NATS subjects, of names in
	// Kubernetes and of provider ids. It is also the driver's user in NATS, so it is none of those that are there already.
	Name string
	// Module is the path of its Go module, such as example.com/driver-acme.
	Module string
}

// maxName leaves room for "driver-" and "-nats" in a DNS label.
const maxName = 50

var (
	validName = regexp.MustCompile(`^[a-z]([-a-z0-9]*[a-z0-9])?$`)
	// Of a path without a dot in its first element Go takes a package for one of the standard library.
	validModule = regexp.MustCompile(`^[a-z0-9][-a-z0-9]*(\.[-a-z0-9]+)+(/[-A-Za-z0-9_~]+(\.[-A-Za-z0-9_~]+)*)*$`)
	// users are those of deploy/kustomize/mcm-embedded-nats/nats.conf.
	users = []string{"mcm", "virtual", "autoscaler", "operator", "keeper"}
)

// Validate returns an error that names all that is wrong.
func (d Driver) Validate() error {
	var errs []error
	if !validName.MatchString(d.Name) || len(d.Name) > maxName {
		errs = append(errs, fmt.Errorf("name %q: want at most %d lower-case letters, digits and '-', a letter first and no '-' last, such as acme",
			d.Name, maxName))
	}
	if slices.Contains(users, d.Name) {
		errs = append(errs, fmt.Errorf("name %q: NATS has a user of that name already: choose another one", d.Name))
	}
	if !validModule.MatchString(d.Module) {
		errs = append(errs, fmt.Errorf("module %q: want the path of a Go module that begins with a domain, such as example.com/driver-acme", d.Module))
	}

	return errors.Join(errs...)
}

// Variable is the name in environment variables of the driver, such as MY_CLOUD.
func (d Driver) Variable() string { return strings.ToUpper(strings.ReplaceAll(d.Name, "-", "_")) }

// Write writes the module into a folder, which it makes. It refuses one that has more than .git: nothing is overwritten.
func (d Driver) Write(dir string) error {
	if err := d.Validate(); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return e.Name() == ".git" })
	if len(entries) > 0 {
		return fmt.Errorf("folder %s is not empty: it has %s; name another one with --dir", dir, entries[0].Name())
	}

	return fs.WalkDir(files, root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}

		return d.writeFile(dir, path)
	})
}

// writeFile writes one file of the template.
func (d Driver) writeFile(dir, path string) error {
	parsed, err := template.ParseFS(files, path)
	if err != nil {
		return err
	}
	to := filepath.Join(dir, filepath.FromSlash(strings.TrimSuffix(strings.TrimPrefix(path, root+"/"), ending)))
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644) //nolint:gosec // source code, for all to read
	if err != nil {
		return err
	}

	return errors.Join(parsed.Execute(file, d), file.Close())
}
