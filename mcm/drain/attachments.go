package drain

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Attachments are the Nodes that PersistentVolumes are attached to, by the volume's name.
type attachments map[string][]string

// on reports whether a volume is attached to a Node.
func (a attachments) on(node, volume string) bool { return slices.Contains(a[volume], node) }

// elsewhere reports whether a volume is attached to another Node.
func (a attachments) elsewhere(node, volume string) bool {
	return slices.ContainsFunc(a[volume], func(n string) bool { return n != node })
}

// to returns the volumes that are attached to a Node, sorted.
func (a attachments) to(node string) []string {
	var volumes []string
	for volume := range a {
		if a.on(node, volume) {
			volumes = append(volumes, volume)
		}
	}
	slices.Sort(volumes)

	return volumes
}

// An attachmentReader reads the VolumeAttachments of the cluster for all drains: the API
// server cannot select those of one Node. It is safe for concurrent use.
type attachmentReader struct {
	mu   sync.Mutex
	last attachments
	read time.Time
}

// attached returns the attachments as they were at most one poll ago. The map must not be changed.
func (d *Drainer) attached(ctx context.Context) (attachments, error) {
	a := &d.attachments
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last != nil && time.Since(a.read) < d.settings.Poll {
		return a.last, nil
	}
	release, err := d.acquireSlot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	read, all := time.Now(), attachments{}
	options := metav1.ListOptions{Limit: chunk}
	for {
		list, err := d.client.StorageV1().VolumeAttachments().List(ctx, options)
		if err != nil {
			return nil, fmt.Errorf("list volume attachments: %w", err)
		}
		for i := range list.Items {
			all.add(&list.Items[i])
		}
		if options.Continue = list.Continue; options.Continue == "" {
			a.last, a.read = all, read

			return all, nil
		}
	}
}

// add adds an attachment that is in force. One in deletion is, until its attacher has detached the volume.
func (a attachments) add(v *storagev1.VolumeAttachment) {
	if name := v.Spec.Source.PersistentVolumeName; name != nil && v.Status.Attached {
		a[*name] = append(a[*name], v.Spec.NodeName)
	}
}
