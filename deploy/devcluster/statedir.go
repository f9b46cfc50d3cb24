package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// stateDir is the directory that holds all of one cluster:
//
//	.devcluster         marks the directory; locked while the cluster runs, contains its process id
//	kubeconfig          of the admin
//	<user>.kubeconfig   of each user of --users
//	*.log               one per component
//	internal/           etcd's data, keys, tokens, the components' kubeconfigs
type stateDir struct {
	path string
	lock *os.File
}

const markerFile = ".devcluster"

// openStateDir creates path if it is missing, locks it, and deletes the cluster in it unless keep is set. It returns an
// error if path has other content.
func openStateDir(path string, keep bool) (*stateDir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("create --dir: %w", err)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("read --dir: %w", err)
	}
	marker := filepath.Join(path, markerFile)
	if _, err := os.Stat(marker); errors.Is(err, fs.ErrNotExist) && len(entries) > 0 {
		return nil, fmt.Errorf("--dir %s is not empty and was not created by devcluster; choose another", path)
	}
	lock, err := os.OpenFile(marker, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock: %w", err)
	}
	d := &stateDir{path: path, lock: lock}
	if err := d.prepare(keep); err != nil {
		_ = lock.Close() // nothing was written to it
		return nil, err
	}
	return d, nil
}

func (d *stateDir) prepare(keep bool) error {
	if err := syscall.Flock(int(d.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := os.ReadFile(d.lock.Name()) // best effort: the message is useful without it
		return fmt.Errorf("--dir %s is in use by process %s; stop it or choose another directory",
			d.path, strings.TrimSpace(string(holder)))
	}
	if err := d.lock.Truncate(0); err != nil {
		return fmt.Errorf("write the lock: %w", err)
	}
	if _, err := fmt.Fprintln(d.lock, os.Getpid()); err != nil {
		return fmt.Errorf("write the lock: %w", err)
	}
	if !keep {
		if err := d.wipe(); err != nil {
			return err
		}
	}
	return os.MkdirAll(d.internal(), 0o700)
}

// wipe deletes a cluster's files, and no others.
func (d *stateDir) wipe() error {
	if err := os.RemoveAll(d.internal()); err != nil {
		return fmt.Errorf("wipe the old cluster: %w", err)
	}
	for _, pattern := range []string{"kubeconfig", "*.kubeconfig", "*.log"} {
		matches, err := fs.Glob(os.DirFS(d.path), pattern)
		if err != nil {
			return err
		}
		for _, name := range matches {
			if err := os.Remove(filepath.Join(d.path, name)); err != nil {
				return fmt.Errorf("wipe the old cluster: %w", err)
			}
		}
	}
	return nil
}

// close releases the lock.
func (d *stateDir) close() error { return d.lock.Close() }

func (d *stateDir) internal(elem ...string) string {
	return filepath.Join(append([]string{d.path, "internal"}, elem...)...)
}

func (d *stateDir) log(component string) string { return filepath.Join(d.path, component+".log") }

// kubeconfig returns the path of a user's kubeconfig.
func (d *stateDir) kubeconfig(name string) string {
	if name == adminUser {
		return filepath.Join(d.path, "kubeconfig")
	}
	if component, ok := strings.CutPrefix(name, "system:"); ok {
		return d.internal(component + ".kubeconfig")
	}
	return filepath.Join(d.path, name+".kubeconfig")
}

// openLog opens a component's log to append to it.
func (d *stateDir) openLog(component string) (*os.File, error) {
	return os.OpenFile(d.log(component), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
}
