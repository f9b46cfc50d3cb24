package dispatch

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Class is a MachineClass with the versions of the secrets it refers to.
type Class struct {
	Object *v1alpha1.MachineClass
	// Secret and Credentials are the metadata of spec.secretRef and
	// spec.credentialsSecretRef; nil where the class has none.
	Secret, Credentials metav1.Object
}

// An Instance is a machine's instance at its provider.
type Instance struct {
	ProviderID string
	NodeName   string
	Addresses  []corev1.NodeAddress
}

// Provider returns the name of a class's driver on the bus, or the default if the class names
// none. It returns an error if there is no name or if it is not valid in a subject.
func Provider(class *v1alpha1.MachineClass, byDefault string) (string, error) {
	provider := strings.ToLower(class.Provider)
	if provider == "" {
		provider = strings.ToLower(byDefault)
	}
	if provider == "" {
		return "", Errorf(InvalidArgument, "MachineClass %s names no provider: set its field provider, "+
			"or run mcm with --default-provider", class.Name)
	}
	if err := bus.ValidToken("provider", provider); err != nil {
		return "", Errorf(InvalidArgument, "MachineClass %s: field provider: %w", class.Name, err)
	}

	return provider, nil
}

// request builds the message of an operation.
func request(op *Operation) *driverv1.Envelope {
	machine, class := machineMessage(op.Machine), classMessage(op.Class)
	switch op.Kind {
	case Create:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Create{
			Create: &driverv1.CreateRequest{Machine: machine, Class: class},
		}}
	case Initialize:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Initialize{
			Initialize: &driverv1.InitializeRequest{Machine: machine, Class: class},
		}}
	case Status:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Status{
			Status: &driverv1.StatusRequest{Machine: machine, Class: class},
		}}
	default:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Delete{
			Delete: &driverv1.DeleteRequest{Machine: machine, Class: class},
		}}
	}
}

func machineMessage(m *v1alpha1.Machine) *driverv1.Machine {
	template := &driverv1.NodeTemplate{
		Labels:      m.Spec.NodeTemplateSpec.Labels,
		Annotations: m.Spec.NodeTemplateSpec.Annotations,
	}
	for _, t := range m.Spec.NodeTemplateSpec.Spec.Taints {
		template.Taints = append(template.Taints, &driverv1.Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
	}

	return &driverv1.Machine{
		Namespace: m.Namespace, Name: m.Name, Uid: string(m.UID),
		Labels: m.Labels, Annotations: machineAnnotations(m.Annotations), NodeTemplate: template,
		ProviderId: m.Spec.ProviderID, NodeName: m.Labels[v1alpha1.LabelKeyNode], LastKnownState: m.Status.LastKnownState,
	}
}

// machineAnnotations omits annotations that may be large and that no driver needs.
func machineAnnotations(all map[string]string) map[string]string {
	some := make(map[string]string, len(all))
	for k, v := range all {
		if k != corev1.LastAppliedConfigAnnotation && k != v1alpha1.AnnotationKeyOperation {
			some[k] = v
		}
	}

	return some
}

func classMessage(c Class) *driverv1.ClassReference {
	if c.Object == nil {
		return nil
	}

	return &driverv1.ClassReference{
		Class:             reference(c.Object),
		Secret:            reference(c.Secret),
		CredentialsSecret: reference(c.Credentials),
	}
}

func reference(o metav1.Object) *driverv1.ObjectReference {
	if o == nil {
		return nil
	}

	return &driverv1.ObjectReference{
		Namespace: o.GetNamespace(), Name: o.GetName(), Uid: string(o.GetUID()), ResourceVersion: o.GetResourceVersion(),
	}
}

// payload returns the parts of a result that a controller needs.
func payload(r *driverv1.Result) (instance *Instance, lastKnownState string, stated bool) {
	switch p := r.GetPayload().(type) {
	case *driverv1.Result_Create:
		return instanceOf(p.Create.GetInstance()), p.Create.GetLastKnownState(), true
	case *driverv1.Result_Initialize:
		return instanceOf(p.Initialize.GetInstance()), p.Initialize.GetLastKnownState(), true
	case *driverv1.Result_InstanceStatus:
		return instanceOf(p.InstanceStatus.GetInstance()), "", false
	case *driverv1.Result_Delete:
		return nil, p.Delete.GetLastKnownState(), true
	default:
		return nil, "", false
	}
}

func instanceOf(i *driverv1.Instance) *Instance {
	if i == nil {
		return nil
	}
	instance := &Instance{ProviderID: i.GetProviderId(), NodeName: i.GetNodeName()}
	for _, a := range i.GetAddresses() {
		instance.Addresses = append(instance.Addresses, corev1.NodeAddress{
			Type: corev1.NodeAddressType(a.GetType()), Address: a.GetAddress(),
		})
	}

	return instance
}
