package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// A migration holds the flags of mcmctl migrate.
type migration struct {
	conn     *connection
	provider string
	file     string
	kube     kubernetes
	apply    bool
	force    bool
}

func newMigrate(conn *connection) *cobra.Command {
	m := &migration{conn: conn}
	cmd := &cobra.Command{
		Use:   "migrate --provider name {-f file | resource/name}",
		Short: "Turn a class of an old, provider-specific kind into a MachineClass",
		Long: `Turn a class of an old, provider-specific kind into a MachineClass.

Only the provider's driver understands such a class, so mcmctl asks one of its
replicas over the bus to convert it. The MachineClass is printed as YAML. With --apply
it is stored in the cluster by server-side apply instead. The old object stays.

The class is read from a file ('-' is standard input), or from the cluster if it is
given as resource/name. A resource may have its group:
awsmachineclasses.machine.sapcloud.io/small. The NATS user needs permission to publish
below mcm.v1.<cluster>.driver.<provider>.migrateclass, and to subscribe below
mcm.v1.<cluster>.reply and mcm.v1.<cluster>.session.`,
		Example: `  mcmctl migrate --provider aws -f old.yaml > new.yaml
  kubectl get awsmachineclass small -o yaml | mcmctl migrate --provider aws -f - | kubectl apply -f -
  mcmctl migrate --provider aws awsmachineclass/small -n shop --apply`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	f := cmd.Flags()
	f.StringVar(&m.provider, "provider", "", "provider whose driver understands the class")
	f.StringVarP(&m.file, "filename", "f", "", "`file` with the old class as YAML or JSON; - for standard input")
	f.BoolVar(&m.apply, "apply", false, "store the MachineClass in the cluster instead of printing it")
	f.BoolVar(&m.force, "force-conflicts", false, "with --apply, overwrite fields that another manager has set")
	m.kube.addFlags(cmd, f)
	mustComplete(cmd, "provider", cobra.NoFileCompletions)
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return m.run(cmd, args) }

	return cmd
}

func (m *migration) run(cmd *cobra.Command, args []string) error {
	switch {
	case m.provider == "":
		return errors.New("--provider is needed: only that provider's driver understands the class")
	case (m.file == "") == (len(args) == 0):
		return errors.New("give the class either as -f file or as resource/name")
	case m.force && !m.apply:
		return errors.New("--force-conflicts needs --apply")
	}
	old, err := m.read(cmd, args)
	if err != nil {
		return err
	}
	conn, err := m.conn.connect(cmd)
	if err != nil {
		return err
	}
	defer conn.Close()
	question := question{conn: conn, cluster: m.conn.cluster, provider: strings.ToLower(m.provider), wait: m.conn.timeout}
	answer, err := question.migrate(cmd.Context(), old)
	if err != nil {
		return err
	}
	class, err := machineClass(answer, old, m.provider)
	if err != nil {
		return fmt.Errorf("the driver of provider %s: %w", m.provider, err)
	}
	if !m.apply {
		text, err := yaml.Marshal(class.Object)
		if err != nil {
			return fmt.Errorf("write the MachineClass: %w", err)
		}
		_, err = cmd.OutOrStdout().Write(text)

		return err
	}
	if err := m.kube.apply(cmd.Context(), class, m.force); err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "machineclass %s/%s applied\n", class.GetNamespace(), class.GetName())

	return nil
}

// read returns the old class, with a namespace.
func (m *migration) read(cmd *cobra.Command, args []string) (*unstructured.Unstructured, error) {
	if m.file != "" {
		old, err := readFile(cmd.InOrStdin(), m.file)
		if err != nil {
			return nil, err
		}
		if old.GetNamespace() == "" {
			namespace, err := m.kube.inNamespace()
			if err != nil {
				return nil, err
			}
			old.SetNamespace(namespace)
		}

		return old, nil
	}

	return m.kube.get(cmd.Context(), args[0])
}
