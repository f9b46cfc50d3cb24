package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/machinebus/machinebus/cmd/mcmctl/message"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// annotationChangeCause is where kubectl and its users give the reason of a change.
const annotationChangeCause = "kubernetes.io/change-cause"

func newRolloutHistory(kube *kubernetes) *cobra.Command {
	var revision int64
	cmd := &cobra.Command{
		Use:   "history deployment",
		Short: "List the revisions of a deployment, or show one",
		Long: `List the revisions of a deployment with their machine sets, classes and numbers of
machines. With --revision, print the template of one as YAML.`,
		Example: `  mcmctl rollout history pool-a
  mcmctl rollout history pool-a --revision 3`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: kube.complete,
	}
	cmd.Flags().Int64Var(&revision, "revision", 0, "print the template of this revision")
	mustComplete(cmd, "revision", cobra.NoFileCompletions)
	out := addFormat(cmd, formatTable, formatJSON)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		d, err := kube.deployments()
		if err != nil {
			return err
		}
		got, err := d.get(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		revisions, err := d.revisions(cmd.Context(), got)
		if err != nil {
			return err
		}
		if revision != 0 {
			return printTemplate(cmd.OutOrStdout(), got.Name, revisions, revision)
		}

		return printHistory(cmd.OutOrStdout(), revisions, out.value, time.Now())
	}

	return cmd
}

// revisionRow is a revision in JSON.
type revisionRow struct {
	Revision    int64     `json:"revision"`
	Set         string    `json:"machineSet"`
	Class       string    `json:"class"`
	Machines    int32     `json:"machines"`
	CreatedAt   time.Time `json:"createdAt"`
	ChangeCause string    `json:"changeCause,omitempty"`

	template v1alpha1.MachineTemplateSpec
}

// revisions lists a deployment's revisions, oldest first.
func (d *deployments) revisions(ctx context.Context, of *v1alpha1.MachineDeployment) ([]revisionRow, error) {
	list := &v1alpha1.MachineSetList{}
	if err := d.List(ctx, list, client.InNamespace(d.namespace)); err != nil {
		return nil, fmt.Errorf("list machine sets in %s: %w", d.namespace, err)
	}
	rows := []revisionRow{}
	for i := range list.Items {
		set := &list.Items[i]
		if !metav1.IsControlledBy(set, of) {
			continue
		}
		revision, err := strconv.ParseInt(set.Annotations[v1alpha1.AnnotationKeyRevision], 10, 64)
		if err != nil {
			continue // the controller has not processed the set yet
		}
		template := *set.Spec.Template.DeepCopy()
		delete(template.Labels, v1alpha1.LabelKeyMachineTemplateHash)
		rows = append(rows, revisionRow{
			Revision: revision, Set: set.Name, Class: template.Spec.Class.Name, Machines: set.Status.Replicas,
			CreatedAt: set.CreationTimestamp.UTC(), ChangeCause: set.Annotations[annotationChangeCause], template: template,
		})
	}
	slices.SortFunc(rows, func(a, b revisionRow) int { return cmp.Compare(a.Revision, b.Revision) })

	return rows, nil
}

func printHistory(w io.Writer, rows []revisionRow, out string, now time.Time) error {
	if out == formatJSON {
		return message.WriteJSON(w, rows, false)
	}
	table := make([][]string, 0, len(rows))
	for _, r := range rows {
		table = append(table, []string{
			strconv.FormatInt(r.Revision, 10), r.Set, r.Class, strconv.Itoa(int(r.Machines)), age(now.Sub(r.CreatedAt)), r.ChangeCause,
		})
	}

	return printTable(w, []string{"REVISION", "MACHINESET", "CLASS", "MACHINES", "AGE", "CHANGE-CAUSE"}, table)
}

func printTemplate(w io.Writer, name string, rows []revisionRow, revision int64) error {
	at := slices.IndexFunc(rows, func(r revisionRow) bool { return r.Revision == revision })
	if at < 0 {
		return fmt.Errorf("machine deployment %s has no revision %d; mcmctl rollout history %s lists those it has", name, revision, name)
	}
	text, err := yaml.Marshal(rows[at].template)
	if err != nil {
		return fmt.Errorf("print the template of revision %d: %w", revision, err)
	}
	_, err = w.Write(text)

	return err
}
