package driversdk

import "context"

// A Driver makes and removes the instances of one provider. S is what the
// providerSpec of a MachineClass decodes into.
//
// Methods run concurrently, but never two at once for one machine in one replica.
// Another replica may race or repeat an operation, so each must be idempotent.
// ctx ends at the operation's deadline, when it is cancelled, and on a hard
// stop; a method returns soon after. An error without a code counts as [Unknown].
//
// Further abilities are interfaces of one method each: [Getter], [Initializer],
// [VolumeIDer], [ClassValidator], [ClassMigrator]; [NodeGroups] has four. A driver
// that implements one advertises it.
type Driver[S any] interface {
	// Create makes the machine's instance, or returns the one that already
	// carries the machine's uid [CREATE-1]. An instance of that name that
	// belongs to another owner is [AlreadyExists] [CREATE-2]. It returns only
	// when the provider has accepted the instance for good [CREATE-3], and
	// records the machine's uid [MACHINE-1] and the request's Owner [OWNER-1] with it.
	Create(ctx context.Context, req *Request[S]) (*Instance, error)
	// Delete removes the machine's instance and what was made along with it. It
	// finds the instance by provider id, or by name and uid where that is empty
	// [DELETE-2]. Deleting an absent instance returns nil [DELETE-1].
	Delete(ctx context.Context, req *Request[S]) error
	// List returns every instance of the class, those being made and removed
	// included [LIST-2], those of control planes of other names than class.Cluster
	// excluded [LIST-3]. Each comes with the owner that it was recorded with [OWNER-1].
	List(ctx context.Context, class *Class[S]) ([]*Instance, error)
}
