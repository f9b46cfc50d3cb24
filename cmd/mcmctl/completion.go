package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// newCompletion replaces cobra's own command, which prints its help and exits 0 for
// an unknown shell.
func newCompletion() *cobra.Command {
	shells := []string{"bash", "fish", "powershell", "zsh"}

	return &cobra.Command{
		Use:   "completion " + strings.Join(shells, "|"),
		Short: "Generate the autocompletion script for the specified shell",
		Example: `  source <(mcmctl completion bash)                  # for this shell; the same with zsh
  mcmctl completion fish | source                   # in this fish
  mcmctl completion powershell | Out-String | Invoke-Expression`,
		ValidArgs: shells,
		Args:      cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			root, out := cmd.Root(), cmd.OutOrStdout()
			switch strings.Join(args, "") {
			case "":
				return cmd.Help()
			case "bash":
				return root.GenBashCompletionV2(out, true)
			case "fish":
				return root.GenFishCompletion(out, true)
			case "powershell":
				return root.GenPowerShellCompletionWithDesc(out)
			case "zsh":
				return root.GenZshCompletion(out)
			default:
				return fmt.Errorf("unknown shell %q: want one of %s", args[0], strings.Join(shells, ", "))
			}
		},
	}
}
