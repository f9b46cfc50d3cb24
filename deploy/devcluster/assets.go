package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

func assetsCommand() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "assets --dir DIR",
		Short: "Create the directory for KUBEBUILDER_ASSETS of controller-runtime's envtest",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return errNoDir
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			if dir, err = filepath.Abs(dir); err != nil {
				return err
			}
			if err := linkAssets(dir, self); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), dir)
			return err
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory to create; its absolute path is printed")
	return cmd
}

// linkAssets creates symlinks to self under the names that envtest starts. It replaces symlinks, but no files.
func linkAssets(dir, self string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make --dir: %w", err)
	}
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		link := filepath.Join(dir, name)
		info, err := os.Lstat(link)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		case info.Mode().Type() != fs.ModeSymlink:
			return fmt.Errorf("%s is not a symlink; remove it or choose another --dir", link)
		default:
			if err := os.Remove(link); err != nil {
				return err
			}
		}
		if err := os.Symlink(self, link); err != nil {
			return err
		}
	}
	return nil
}
