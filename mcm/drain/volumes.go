package drain

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// DeleteVolumeAttachments deletes the VolumeAttachments of a Node whose pods were deleted by
// force, so that their volumes can be attached elsewhere without waiting for the Node. It
// returns how many it deleted, without those in deletion. The caller repeats it until it
// returns 0, because the attach-detach controller may create new ones.
func DeleteVolumeAttachments(ctx context.Context, c kubernetes.Interface, node string) (int, error) {
	n := 0
	var errs []error
	options := metav1.ListOptions{Limit: chunk}
	for {
		// There is no field selector for the Node.
		list, err := c.StorageV1().VolumeAttachments().List(ctx, options)
		if err != nil {
			return n, join(append(errs, fmt.Errorf("list volume attachments: %w", err))...)
		}
		for i := range list.Items {
			attachment := &list.Items[i]
			if attachment.Spec.NodeName != node || !attachment.DeletionTimestamp.IsZero() {
				continue
			}
			err := c.StorageV1().VolumeAttachments().Delete(ctx, attachment.Name, metav1.DeleteOptions{
				Preconditions: metav1.NewUIDPreconditions(string(attachment.UID)),
			})
			if err != nil && !apierrors.IsNotFound(err) {
				errs = append(errs, fmt.Errorf("delete volume attachment %s: %w", attachment.Name, err))

				continue
			}
			n++
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return n, join(errs...)
		}
	}
}
