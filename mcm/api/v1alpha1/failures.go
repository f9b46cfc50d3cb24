package v1alpha1

// MostFailedMachines is how many machines FailedMachines lists. With texts as ShortText leaves them that is far from
// what an API server stores of one object (1.5 MB), and from what makes each write of a large pool's status expensive.
const MostFailedMachines = 100

// FirstFailedMachines returns the first MostFailedMachines of a list, with short texts.
func FirstFailedMachines(all []MachineSummary) []MachineSummary {
	if len(all) > MostFailedMachines {
		all = all[:MostFailedMachines:MostFailedMachines]
	}
	for i := range all {
		all[i].LastOperation.Description = ShortText(all[i].LastOperation.Description)
	}
	return all
}

// ShortText keeps a text short enough for a status, whatever a cloud has answered. It leaves out of the middle: what a
// text begins and ends with says what it is about.
func ShortText(text string) string {
	const first, last = 350, 150
	runes := []rune(text)
	if len(runes) <= first+last {
		return text
	}
	return string(runes[:first]) + "…" + string(runes[len(runes)-last:])
}
