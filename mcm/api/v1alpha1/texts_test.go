package v1alpha1

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestErrorText(t *testing.T) {
	t.Parallel()

	cases := map[string]struct {
		reason, code, message, want string
	}{
		"plain": {
			reason:  "This is the form that clients parse.",
			code:    ErrorCodeNotFound,
			message: "no such image",
			want:    "machine codes error: code = [NotFound] message = [no such image]",
		},
		"balanced brackets": {
			reason:  "Nested groups are read right, so the message stays as the driver wrote it.",
			code:    ErrorCodeInternal,
			message: "quota [cpu [west]] reached",
			want:    "machine codes error: code = [Internal] message = [quota [cpu [west]] reached]",
		},
		"brackets that close too early": {
			reason:  "They would end the message, and what follows would be a third group.",
			code:    ErrorCodeInternal,
			message: "a] and [b",
			want:    "machine codes error: code = [Internal] message = [a) and (b]",
		},
		"bracket that stays open": {
			reason:  "The message would never end.",
			code:    ErrorCodeUnknown,
			message: "list [1, 2",
			want:    "machine codes error: code = [Unknown] message = [list (1, 2]",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			if diff := cmp.Diff(tc.want, ErrorText(tc.code, tc.message)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

func TestFailureTexts(t *testing.T) {
	t.Parallel()

	cases := map[string]struct{ got, want string }{
		"create": {
			got:  CreateFailedText(ErrorCodeResourceExhausted, "quota"),
			want: "Cloud provider message - machine codes error: code = [ResourceExhausted] message = [quota]",
		},
		"initialize": {
			got:  InitializeFailedText(ErrorCodeUnavailable, "later"),
			want: "Provider error: machine codes error: code = [Unavailable] message = [later]. Initialize VM Instance",
		},
	}
	for name, tc := range cases {
		if diff := cmp.Diff(tc.want, tc.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestTexts has the texts as other programs look for them.
func TestTexts(t *testing.T) {
	t.Parallel()

	for want, got := range map[string]string{
		"Set machine status to termination. Now, getting VM Status": DeletionTextGetVMStatus,
		"Initiate node drain":                                                 DeletionTextDrain,
		"Delete Volume Attachments":                                           DeletionTextDeleteVolumeAttachments,
		"Initiate VM deletion":                                                DeletionTextDeleteVM,
		"Initiate node object deletion":                                       DeletionTextDeleteNode,
		"VM deletion was successful. Initiate node object deletion":           TextVMDeleted,
		"Aborting operation.":                                                 TextAborting,
		"Initialize VM Instance":                                              TextInitialize,
		"Node drain successful. Node is ready for update":                     TextReadyForUpdate,
		"Creating machine on cloud provider":                                  TextCreating,
		"Created machine on cloud provider":                                   TextCreated,
		"VM using old node obj":                                               TextOldNode,
		"Machine Health Timeout was reset due to APIServer being unreachable": TextHealthTimeoutReset,
	} {
		if got != want {
			t.Errorf("a text is %q, want %q", got, want)
		}
	}
}

// TestDeletionTexts guards the take-over of half-deleted machines: if one text contained another, the step found would
// depend on luck.
func TestDeletionTexts(t *testing.T) {
	t.Parallel()

	texts := []string{
		DeletionTextGetVMStatus, DeletionTextDrain, DeletionTextDeleteVolumeAttachments,
		DeletionTextDeleteVM, DeletionTextDeleteNode,
	}
	for i, a := range texts {
		for j, b := range texts {
			if i != j && strings.Contains(a, b) {
				t.Errorf("%q contains %q", a, b)
			}
		}
	}
}
