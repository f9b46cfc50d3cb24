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
	// Kubernetes and of provider ids.
	Name string
	// Module is the path of its Go module, such as example.com/driver-acme.
	Module string
}

// maxName leaves room for "driver-" and "-nats" in a DNS label.
const maxName = 50

var (
	validName   = regexp.MustCompile(`^[a-z]([-a-z0-9]*[a-z0-9])?$`)
	validModule = regexp.MustCompile(`^[A-Za-z0-9][-A-Za-z0-9._~]*(/[-A-Za-z0-9._~]+)*$`)
)

// Validate returns an error that names all that is wrong.
func (d Driver) Validate() error {
	var errs []error
	if !validName.MatchString(d.Name) || len(d.Name) > maxName {
		errs = append(errs, fmt.Errorf("name %q: want at most %d lower-case letters, digits and '-', a letter first and no '-' last, such as acme",
			d.Name, maxName))
	}
	if !validModule.MatchString(d.Module) {
		errs = append(errs, fmt.Errorf("module %q: want the path of a Go module, such as example.com/driver-acme", d.Module))
	}

	return errors.Join(errs...)
}

// Variable is the name in environment variables of the driver, such as MY_CLOUD.
func (d Driver) Variable() string { return strings.ToUpper(strings.ReplaceAll(d.Name, "-", "_")) }

// Write writes the module into a folder, which it makes. It refuses one that is not empty: nothing is overwritten.
func (d Driver) Write(dir string) error {
	if err := d.Validate(); err != nil {
		return err
	}
	switch entries, err := os.ReadDir(dir); {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case len(entries) > 0:
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
