package v1alpha1

import (
	"fmt"
	"strings"
)

// Steps of a deletion, in their order. While a machine is Terminating, the description of its last operation contains
// the text of the next step. MCM has no other memory of how far it got: a machine that it left half deleted is taken
// over by looking for these texts in this order, and dashboards match them.
const (
	DeletionTextGetVMStatus             = "Set machine status to termination. Now, getting VM Status"
	DeletionTextDrain                   = "Initiate node drain"
	DeletionTextDeleteVolumeAttachments = "Delete Volume Attachments"
	DeletionTextDeleteVM                = "Initiate VM deletion"
	DeletionTextDeleteNode              = "Initiate node object deletion"
)

// Descriptions of a last operation. Those whose names contain Format take, in this order, what their comment says.
const (
	TextCreating            = "Creating machine on cloud provider"
	TextCreated             = "Created machine on cloud provider"
	TextInitialize          = "Initialize VM Instance"                                                          // ends the description of a failed initialization
	TextOldNode             = "VM using old node obj"                                                           // the instance came up under the name of a Node of another machine
	TextFormatJoined        = "Machine %s successfully joined the cluster in %v"                                // name, duration
	TextFormatRejoined      = "Machine %s successfully re-joined the cluster"                                   // name
	TextFormatFailedToJoin  = "Machine %s failed to join the cluster in %v minutes."                            // name, minutes
	TextFormatUnhealthy     = "Machine %s is unhealthy - changing MachinePhase to Unknown. Node conditions: %v" // name, conditions
	TextFormatUpdated       = "Machine %s successfully updated dependencies"                                    // name
	TextFormatUpdateFailed  = "Machine %s failed to update dependencies: %s"                                    // name, the agent's reason
	TextFormatUpdateTimeout = "Machine %s failed to in-place update in %v minutes."                             // name, duration
	TextHealthFailing       = "health checks failing since last"                                                // part of the description
	TextHealthTimeoutReset  = "Machine Health Timeout was reset due to APIServer being unreachable"
	TextAborting            = "Aborting operation." // part of the description of a failed deletion that is not tried again soon
	TextVMDeleted           = "VM deletion was successful. " + DeletionTextDeleteNode
	TextReadyForUpdate      = "Node drain successful. Node is ready for update" // another manager's: updates in place are not carried out here
)

// TextFormatMisconfiguredPDB says why a pod cannot be evicted; it takes the namespace and name of the budget.
const TextFormatMisconfiguredPDB = "pod disruption budget %s/%s is misconfigured and requires zero voluntary evictions"

// ErrorText renders a driver's error the way clients parse it: they take the two outermost groups in brackets for the
// name of the code and the message. Brackets in a message that would mislead them are replaced by parentheses.
func ErrorText(code, message string) string {
	if !balanced(message) {
		message = strings.NewReplacer("[", "(", "]", ")").Replace(message)
	}
	return fmt.Sprintf("machine codes error: code = [%s] message = [%s]", code, message)
}

func balanced(s string) bool {
	open := 0
	for _, r := range s {
		switch r {
		case '[':
			open++
		case ']':
			open--
		}
		if open < 0 {
			return false
		}
	}
	return open == 0
}

// CreateFailedText is the description of a machine whose instance could not be created.
func CreateFailedText(code, message string) string {
	return "Cloud provider message - " + ErrorText(code, message)
}

// InitializeFailedText is the description of a machine whose instance could not be initialized.
func InitializeFailedText(code, message string) string {
	return fmt.Sprintf("Provider error: %s. %s", ErrorText(code, message), TextInitialize)
}
